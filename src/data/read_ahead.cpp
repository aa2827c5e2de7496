// The reading thread: a queue of slots, filled in order.
#include "data/read_ahead.h"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "poise/interrupt.h"

namespace poise::data {

struct ReadAhead::Slot {
  std::int64_t cursor = 0;
  bool done = false;  // guarded by Worker::mutex, as are the two below until it is set
  Window window;
  std::exception_ptr error;
};

struct ReadAhead::Worker {
  explicit Worker(Read read) : read(std::move(read)), thread([this] { run(); }) {}
  ~Worker() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }
  void run();
  void fill(Slot& slot);

  Read read;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Slot>> queue;
  bool stopping = false;
  std::thread thread;  // last: it uses the members above
};

void ReadAhead::Worker::run() {
  for (;;) {
    std::shared_ptr<Slot> slot;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return stopping || !queue.empty(); });
      if (stopping) return;
      slot = std::move(queue.front());
      queue.pop_front();
    }
    fill(*slot);
  }
}

void ReadAhead::Worker::fill(Slot& slot) {
  Window window;
  std::exception_ptr error;
  try {
    window = read(slot.cursor);
  } catch (...) {
    error = std::current_exception();  // thrown again by take()
  }
  {
    std::lock_guard lock(mutex);
    slot.window = std::move(window);
    slot.error = error;
    slot.done = true;
  }
  changed.notify_all();
}

ReadAhead::ReadAhead(Read read) : read_(std::move(read)), process_(::getpid()) {}

ReadAhead::~ReadAhead() { forget_parent(); }

// A fork copies the mutex in any state and no thread: the child must not touch the worker, nor join
// it.
void ReadAhead::forget_parent() {
  if (process_ == ::getpid()) return;
  process_ = ::getpid();
  slots_.clear();
  static_cast<void>(worker_.release());
}

void ReadAhead::request(std::int64_t cursor) {
  forget_parent();
  if (!worker_) worker_ = std::make_unique<Worker>(read_);
  auto slot = std::make_shared<Slot>();
  slot->cursor = cursor;
  slots_.push_back(slot);
  {
    std::lock_guard lock(worker_->mutex);
    worker_->queue.push_back(std::move(slot));
  }
  worker_->changed.notify_all();
}

std::size_t ReadAhead::requested() {
  forget_parent();
  return slots_.size();
}

ReadAhead::Window ReadAhead::take() {
  POISE_CHECK(requested() > 0, "nothing was requested");
  const std::shared_ptr<Slot> slot = std::move(slots_.front());
  slots_.pop_front();
  {
    std::unique_lock lock(worker_->mutex);
    interruptible_wait(worker_->changed, lock, [&] { return slot->done; });
  }
  if (slot->error) std::rethrow_exception(slot->error);
  return std::move(slot->window);
}

void ReadAhead::drop() {
  forget_parent();
  slots_.clear();
  if (!worker_) return;
  std::lock_guard lock(worker_->mutex);
  worker_->queue.clear();
}

}  // namespace poise::data
