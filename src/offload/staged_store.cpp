// Spans of a store that knows the CPU only, for tensors of a device: by way of host memory, on a
// thread that takes one transfer after the other.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/StreamGuard.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "poise/error.h"
#include "poise/offload.h"

namespace poise::offload {
namespace {

// Spans may outlive their store, and one thread drives all of them.
struct Way {
  Way(std::shared_ptr<HostMemory> memory, c10::Device device)
      : memory(std::move(memory)), device(device), down(device), up(device) {
    if (!device.is_cpu()) {
      quiet = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    }
  }

  // Pinning takes as long as a copy does, so that buffers are used again: the smallest that is
  // large enough. Where none is, one that is too small goes, so that there are never more than were
  // in flight.
  at::Tensor take_buffer(std::int64_t numel, at::ScalarType dtype) {
    const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
    const std::lock_guard guard(mutex);
    auto found = free.lower_bound(bytes);
    if (found == free.end()) {
      if (!free.empty()) free.erase(free.begin());
      return memory->allocate(bytes, at::kByte);
    }
    auto buffer = found->second;
    free.erase(found);
    return buffer;
  }
  void give_back(const at::Tensor& buffer) {
    const std::lock_guard guard(mutex);
    free.emplace(buffer.numel(), buffer);
  }
  static at::Tensor as(const at::Tensor& buffer, std::int64_t numel, at::ScalarType dtype) {
    const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
    return buffer.narrow(0, 0, bytes).view(dtype);
  }

  const std::shared_ptr<HostMemory> memory;
  const c10::Device device;
  std::mutex mutex;
  std::multimap<std::int64_t, at::Tensor> free;  // by bytes
  Stream down;                                   // from the device; driven by who calls
  Stream up;                                     // to it; driven by the relay
  // The relay's current one: what it submits waits for nothing that others have queued.
  std::optional<c10::Stream> quiet;
  Event last;    // of the relay
  Stream relay;  // between the host and the store; the last member: it ends first
};

class StagedSpan final : public Span {
 public:
  StagedSpan(SpanPtr away, std::shared_ptr<Way> way)
      : Span(away->numel(), away->dtype()), away_(std::move(away)), way_(std::move(way)) {}

 private:
  Event do_fetch(std::int64_t begin, const at::Tensor& to) override {
    // After it the device has no further use for what lay there before.
    begin_anew();
    const Event ready = on_device(to) ? way_->down.submit([] {}) : Event();
    return way_->last = way_->relay.submit([this_ = away_, way = way_.get(), begin, to, ready] {
      if (to.is_cpu()) {
        this_->fetch(begin, to).synchronize_on_worker();
        return;
      }
      const auto memory = way->take_buffer(to.numel(), this_->dtype());
      const auto buffer = Way::as(memory, to.numel(), this_->dtype());
      this_->fetch(begin, buffer).synchronize_on_worker();
      const c10::StreamGuard alone(*way->quiet);
      way->up.wait(ready);
      way->up.submit([to, buffer] { to.copy_(buffer, /*non_blocking=*/true); })
          .synchronize_on_worker();
      way->give_back(memory);
    });
  }

  Event do_put(std::int64_t begin, const at::Tensor& from) override {
    begin_anew();
    if (from.is_cpu()) {
      return way_->last = way_->relay.submit(
                 [this_ = away_, begin, from] { this_->put(begin, from).synchronize_on_worker(); });
    }
    POISE_CHECK(on_device(from));
    const auto memory = way_->take_buffer(from.numel(), dtype());
    const auto buffer = Way::as(memory, from.numel(), dtype());
    way_->relay.wait(
        way_->down.submit([from, buffer] { buffer.copy_(from, /*non_blocking=*/true); }));
    return way_->last =
               way_->relay.submit([this_ = away_, way = way_.get(), begin, memory, buffer] {
                 this_->put(begin, buffer).synchronize_on_worker();
                 way->give_back(memory);
               });
  }

  // After a transfer that failed and is over, of which those who waited for it have heard.
  void begin_anew() {
    if (!way_->last.done()) return;
    try {
      way_->last.synchronize_on_worker();
    } catch (...) {
      way_->last = {};
      try {
        way_->relay.synchronize();
      } catch (...) {
        // The same: a stream says it once, and is usable then.
      }
    }
  }

  bool on_device(const at::Tensor& tensor) const { return tensor.device() == way_->device; }

  const SpanPtr away_;
  const std::shared_ptr<Way> way_;
};

class StagedStore final : public Store {
 public:
  StagedStore(std::shared_ptr<Store> away, std::shared_ptr<HostMemory> memory, c10::Device device)
      : away_(std::move(away)), way_(std::make_shared<Way>(std::move(memory), device)) {}

  SpanPtr reserve(std::int64_t numel, at::ScalarType dtype) override {
    return std::make_shared<StagedSpan>(away_->reserve(numel, dtype), way_);
  }
  std::int64_t file_bytes() const override { return away_->file_bytes(); }

 private:
  const std::shared_ptr<Store> away_;
  const std::shared_ptr<Way> way_;
};

}  // namespace

std::shared_ptr<Store> staged_store(std::shared_ptr<Store> store,
                                    std::shared_ptr<HostMemory> memory, c10::Device device) {
  return std::make_shared<StagedStore>(std::move(store), std::move(memory), device);
}

}  // namespace poise::offload
