// The thread's loop.
#include "zero/lookout.h"

#include <utility>

#include "core/fork.h"

namespace poise::zero {

Lookout::Lookout(std::chrono::milliseconds period, std::function<void()> look)
    : generation_(fork_generation()), thread_([this, period, look = std::move(look)] {
        std::unique_lock lock(mutex_);
        while (!changed_.wait_for(lock, period, [this] { return ends_; })) {
          lock.unlock();
          look();
          lock.lock();
        }
      }) {}

Lookout::~Lookout() {
  if (generation_ != fork_generation()) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace poise::zero
