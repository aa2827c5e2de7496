// Streams on CUDA: the closure runs at once on the host and enqueues its kernels on a side stream.
//
// [Note: memory of work in flight] The caching allocator gives memory that is freed to the stream
// it was allocated on at once, which is right for that stream alone: kernels and copies of a side
// stream may still use it. So what a closure captured is held until its operation is over, or until
// a stream was ordered after it (whatever that stream writes then comes later).
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/stream_backend.h"
#include "poise/error.h"

namespace poise {
namespace {

using c10::cuda::CUDAStream;

class CudaEvent final : public EventState {
 public:
  explicit CudaEvent(const CUDAStream& stream) : device_(stream.device_index()) {
    event_.record(stream);
  }
  // `submitter`: the stream whose memory it is.
  CudaEvent(const CUDAStream& stream, Stream::Work held, const CUDAStream& submitter)
      : device_(stream.device_index()), submitter_(submitter), held_(std::move(held)) {
    event_.record(stream);
  }

  bool done() const override {
    if (!event_.query()) return false;
    let_go();
    return true;
  }
  void order_current() override {
    const auto current = c10::cuda::getCurrentCUDAStream(device_);
    order(current);
    if (submitter_ == current) let_go();
  }
  void block_worker() override {
    event_.synchronize();
    let_go();
  }

  void order(const CUDAStream& stream) { event_.block(stream); }

  // Polls: cudaEventSynchronize could not be interrupted. 100 us is far below what such a wait is
  // for.
  bool block(Deadline deadline) override {
    auto next_check = std::chrono::steady_clock::now() + kInterruptPeriod;
    while (!done()) {
      const auto now = std::chrono::steady_clock::now();
      if (deadline && now >= *deadline) return false;
      if (now >= next_check) {
        check_interrupt();
        next_check = now + kInterruptPeriod;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

 private:
  // The last tensors may end here, with code of theirs: outside of the lock.
  void let_go() const {
    Stream::Work held;
    {
      const std::lock_guard guard(mutex_);
      std::swap(held, held_);
    }
  }

  const c10::DeviceIndex device_;
  c10::cuda::CUDAEvent event_;
  const std::optional<CUDAStream> submitter_;
  mutable std::mutex mutex_;  // copies of an Event may be asked on several threads
  mutable Stream::Work held_;
};

class CudaStream final : public StreamBackend {
 public:
  explicit CudaStream(c10::DeviceIndex device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device)) {}

  ~CudaStream() override {
    if (in_flight_.empty()) return;
    try {
      in_flight_.back()->block_worker();
    } catch (const std::exception&) {  // the device is lost; nothing writes there any more
    }
  }

  // A closure that throws has thrown before anything here was recorded: submit() passes it on. Its
  // context needs no carrying, it is the caller's thread.
  std::shared_ptr<EventState> submit(Stream::Work work, Stream::Reopen) override {
    const auto submitter = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    CudaEvent(submitter).order(stream_);
    while (!in_flight_.empty() && in_flight_.front()->done()) in_flight_.pop_front();
    const auto hold = [&] {
      in_flight_.push_back(std::make_shared<CudaEvent>(stream_, std::move(work), submitter));
    };
    const c10::cuda::CUDAStreamGuard guard(stream_);
    try {
      work();
    } catch (...) {
      hold();  // something may be queued already
      throw;
    }
    hold();
    return in_flight_.back();
  }

  void wait(const std::shared_ptr<EventState>& event) override {
    if (auto* on_gpu = dynamic_cast<CudaEvent*>(event.get())) {
      on_gpu->order(stream_);
    } else {
      event->block(std::nullopt);
    }
  }

  void synchronize() override {
    CudaEvent(stream_).block(std::nullopt);
    in_flight_.clear();
  }

 private:
  CUDAStream stream_;
  std::deque<std::shared_ptr<CudaEvent>> in_flight_;  // with what they hold, if nobody asks
};

}  // namespace

std::unique_ptr<StreamBackend> make_cuda_stream(c10::Device device) {
  const int count = c10::cuda::device_count();  // 0 without a driver, never throws
  const int index = device.has_index() || count == 0 ? device.index() : c10::cuda::current_device();
  if (index < 0 || index >= count) {
    fail("core", "no such CUDA device: ", device.str(), "; this machine has ", count);
  }
  return std::make_unique<CudaStream>(static_cast<c10::DeviceIndex>(index));
}

}  // namespace poise
