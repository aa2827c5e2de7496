// The twin of io_uring: threads that call pread and pwrite.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "core/fork.h"
#include "offload/block_io.h"

namespace poise::offload {
namespace {

class Threads final : public BlockIo {
 public:
  explicit Threads(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~Threads() override {
    if (generation_ != fork_generation()) {  // a forked child: the threads are the parent's
      for (auto& thread : threads_) thread.detach();
      return;
    }
    {
      const std::lock_guard guard(mutex_);
      closing_ = true;
    }
    more_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void start(const BlockRequest& request) override {
    {
      const std::lock_guard guard(mutex_);
      requests_.push_back(request);
    }
    more_.notify_one();
  }

  BlockResult wait() override {
    std::unique_lock lock(mutex_);
    over_.wait(lock, [&] { return !results_.empty(); });
    const auto result = results_.front();
    results_.pop_front();
    return result;
  }

  const char* name() const override { return "threads"; }

 private:
  void run() {
    sigset_t all;  // signals are for the threads of the program; SIGXFSZ would end it
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    std::unique_lock lock(mutex_);
    for (;;) {
      more_.wait(lock, [&] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const auto request = requests_.front();
      requests_.pop_front();
      lock.unlock();
      const auto result = perform(request);
      lock.lock();
      results_.push_back({request.buffer, result});
      over_.notify_one();
    }
  }

  static std::int64_t perform(const BlockRequest& r) {
    const auto bytes = static_cast<std::size_t>(r.bytes);
    const auto moved =
        r.write ? pwrite(r.file, r.data, bytes, r.offset) : pread(r.file, r.data, bytes, r.offset);
    return moved >= 0 ? moved : -errno;
  }

  std::mutex mutex_;
  std::condition_variable more_, over_;
  std::deque<BlockRequest> requests_;
  std::deque<BlockResult> results_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
  const int generation_ = fork_generation();
};

}  // namespace

std::unique_ptr<BlockIo> make_threads(std::size_t buffers) {
  return std::make_unique<Threads>(std::clamp<std::size_t>(buffers, 1, 16));
}

}  // namespace poise::offload
