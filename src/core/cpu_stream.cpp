// Streams on the CPU: a queue and the thread that empties it.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/fork.h"
#include "core/stream_backend.h"
#include "poise/error.h"
#include "poise/log.h"

namespace poise {
namespace {

// An exception on its way to whoever waits; shared by the events that it fails.
struct Failure {
  std::exception_ptr error;
  std::atomic<bool> seen{false};

  [[noreturn]] void rethrow() {
    seen = true;
    std::rethrow_exception(error);
  }
};
using FailurePtr = std::shared_ptr<Failure>;

class HostEvent final : public EventState {
 public:
  bool done() const override { return done_.load(std::memory_order_acquire); }

  void order_current() override { block(std::nullopt); }

  bool block(Deadline deadline) override {
    if (!done()) {
      check_same_process();
      std::unique_lock lock(mutex_);
      if (!interruptible_wait(
              over_, lock, [&] { return done(); }, deadline))
        return false;
    }
    if (failure_) failure_->rethrow();
    return true;
  }

  void block_worker() override {
    if (!done()) {
      check_same_process();
      std::unique_lock lock(mutex_);
      over_.wait(lock, [&] { return done(); });
    }
    if (failure_) failure_->rethrow();
  }

  void finish(FailurePtr failure) {
    failure_ = std::move(failure);  // before done_: read only after it
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    over_.notify_all();
  }

 private:
  void check_same_process() const {
    if (generation_ == fork_generation()) return;
    fail("core",
         "an operation submitted before a fork is not over and never will be in the child; "
         "wait for it before forking");
  }

  std::mutex mutex_;
  std::condition_variable over_;
  std::atomic<bool> done_{false};
  FailurePtr failure_;
  const int generation_ = fork_generation();
};

struct Operation {
  Stream::Work work;
  Stream::Reopen reopen;
  std::shared_ptr<HostEvent> event;
};

class Worker {
 public:
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    more_.notify_one();
    if (thread_.joinable()) thread_.join();
    if (failure_ && !failure_->seen) report(failure_->error);
  }

  std::shared_ptr<HostEvent> enqueue(Stream::Work work, Stream::Reopen reopen) {
    auto event = std::make_shared<HostEvent>();
    {
      const std::lock_guard lock(mutex_);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      queue_.push_back({std::move(work), std::move(reopen), event});
    }
    more_.notify_one();
    return event;
  }

  FailurePtr take_failure() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, nullptr);
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      more_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Operation operation = std::move(queue_.front());
      queue_.pop_front();
      FailurePtr failure = failure_;
      lock.unlock();
      if (!failure) failure = perform(operation);
      operation.work = nullptr;  // frees what it held before anybody hears that it is over
      operation.reopen = nullptr;
      lock.lock();
      failure_ = failure;
      lock.unlock();
      operation.event->finish(std::move(failure));
      operation.event.reset();
      lock.lock();
    }
  }

  static FailurePtr perform(Operation& operation) {
    pause_for_test();
    try {
      const auto context = operation.reopen ? operation.reopen() : nullptr;
      operation.work();
      operation.work = nullptr;  // inside the context it ran in
      return nullptr;
    } catch (...) {
      auto failure = std::make_shared<Failure>();
      failure->error = std::current_exception();
      return failure;
    }
  }

  // A destructor cannot throw: what nobody asked for is at least said.
  static void report(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      log::warning("[core] a stream ended with a failure that nobody waited for: ", known.what());
    } catch (...) {
      log::warning("[core] a stream ended with a failure that nobody waited for");
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Operation> queue_;
  FailurePtr failure_;
  bool closing_ = false;
  std::thread thread_;
};

class CpuStream final : public StreamBackend {
 public:
  ~CpuStream() override { abandon_after_fork(); }

  std::shared_ptr<EventState> submit(Stream::Work work, Stream::Reopen reopen) override {
    return worker().enqueue(std::move(work), std::move(reopen));
  }

  void wait(const std::shared_ptr<EventState>& event) override {
    worker().enqueue([event] { event->block_worker(); }, {});
  }

  void synchronize() override {
    const auto last = worker().enqueue([] {}, {});
    try {
      last->block(std::nullopt);
    } catch (...) {
      if (last->done()) worker().take_failure();  // not over: it was an interrupt
      throw;
    }
  }

 private:
  // In a forked child the old worker has no thread and perhaps a locked mutex: it is left as it is.
  void abandon_after_fork() {
    if (generation_ == fork_generation()) return;
    static_cast<void>(worker_.release());
    generation_ = fork_generation();
  }

  Worker& worker() {
    abandon_after_fork();
    if (!worker_) worker_ = std::make_unique<Worker>();
    return *worker_;
  }

  std::unique_ptr<Worker> worker_;
  int generation_ = fork_generation();
};

}  // namespace

std::unique_ptr<StreamBackend> make_cpu_stream() { return std::make_unique<CpuStream>(); }

}  // namespace poise
