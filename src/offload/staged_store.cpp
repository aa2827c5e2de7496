// Spans of a store that knows the CPU only, for tensors of a device: by way of host memory, on a
// thread that takes one transfer after the other.
#include <map>
#include <mutex>
#include <utility>

#include "poise/error.h"
#include "poise/offload.h"

namespace poise::offload {
namespace {

// Spans may outlive their store, and one thread drives all of them.
struct Way {
  Way(std::shared_ptr<HostMemory> memory, c10::Device device)
      : memory(std::move(memory)), device(device), down(device), up(device) {}

  // Pinning takes as long as a copy does, so that buffers are used again.
  at::Tensor take_buffer(std::int64_t numel, at::ScalarType dtype) {
    const std::lock_guard guard(mutex);
    const auto found = free.find({dtype, numel});
    if (found == free.end()) return memory->allocate(numel, dtype);
    const auto buffer = found->second;
    free.erase(found);
    return buffer;
  }
  void give_back(const at::Tensor& buffer) {
    const std::lock_guard guard(mutex);
    free.emplace(std::pair(buffer.scalar_type(), buffer.numel()), buffer);
  }

  const std::shared_ptr<HostMemory> memory;
  const c10::Device device;
  std::mutex mutex;
  std::multimap<std::pair<at::ScalarType, std::int64_t>, at::Tensor> free;
  Stream down;   // from the device; driven by who calls
  Stream up;     // to it; driven by the relay
  Stream relay;  // between the host and the store; the last member: it ends first
};

class StagedSpan final : public Span {
 public:
  StagedSpan(SpanPtr away, std::shared_ptr<Way> way)
      : Span(away->numel(), away->dtype()), away_(std::move(away)), way_(std::move(way)) {}

 private:
  Event do_fetch(std::int64_t begin, const at::Tensor& to) override {
    // After it the device has no further use for what lay there before.
    const Event ready = on_device(to) ? way_->down.submit([] {}) : Event();
    return way_->relay.submit([this_ = away_, way = way_.get(), begin, to, ready] {
      if (to.is_cpu()) {
        this_->fetch(begin, to).synchronize();
        return;
      }
      const auto buffer = way->take_buffer(to.numel(), this_->dtype());
      this_->fetch(begin, buffer).synchronize();
      way->up.wait(ready);
      way->up.submit([to, buffer] { to.copy_(buffer, /*non_blocking=*/true); }).synchronize();
      way->give_back(buffer);
    });
  }

  Event do_put(std::int64_t begin, const at::Tensor& from) override {
    if (from.is_cpu()) {
      return way_->relay.submit(
          [this_ = away_, begin, from] { this_->put(begin, from).synchronize(); });
    }
    POISE_CHECK(on_device(from));
    const auto buffer = way_->take_buffer(from.numel(), dtype());
    way_->relay.wait(
        way_->down.submit([from, buffer] { buffer.copy_(from, /*non_blocking=*/true); }));
    return way_->relay.submit([this_ = away_, way = way_.get(), begin, buffer] {
      this_->put(begin, buffer).synchronize();
      way->give_back(buffer);
    });
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
