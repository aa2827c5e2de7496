// Spans in memory: a tensor on the device, and the host store.
#include "poise/error.h"
#include "poise/offload.h"

namespace poise::offload {
namespace {

// A stream each way, so that transfers down and up overlap.
struct Streams {
  explicit Streams(c10::Device device) : device(device), out(device), in(device) {}
  const c10::Device device;
  Stream out;  // fetches
  Stream in;   // puts
};

class MemorySpan final : public Span {
 public:
  MemorySpan(at::Tensor tensor, std::shared_ptr<Streams> streams)
      : Span(tensor.numel(), tensor.scalar_type()),
        tensor_(std::move(tensor)),
        streams_(std::move(streams)) {}

  at::Tensor tensor() const override { return tensor_; }

 private:
  Event do_fetch(std::int64_t begin, const at::Tensor& to) override {
    if (by_host(to)) synchronize();
    streams_->out.wait(last_put_);
    return last_fetch_ = copy(streams_->out, tensor_.narrow(0, begin, to.numel()), to);
  }
  Event do_put(std::int64_t begin, const at::Tensor& from) override {
    if (by_host(from)) synchronize();
    streams_->in.wait(last_fetch_);
    return last_put_ = copy(streams_->in, from, tensor_.narrow(0, begin, from.numel()));
  }
  // Copies from host to host are made at once, whatever the streams of a GPU still have to do.
  bool by_host(const at::Tensor& other) const {
    return !streams_->device.is_cpu() && tensor_.is_cpu() && other.is_cpu();
  }
  void synchronize() const {
    last_put_.synchronize();
    last_fetch_.synchronize();
  }
  static Event copy(Stream& stream, const at::Tensor& from, const at::Tensor& to) {
    return stream.submit(
        [from, to] { to.view({-1}).copy_(from.view({-1}), /*non_blocking=*/true); });
  }

  at::Tensor tensor_;
  std::shared_ptr<Streams> streams_;
  Event last_fetch_, last_put_;
};

class HostStore final : public Store {
 public:
  HostStore(std::shared_ptr<HostMemory> memory, c10::Device device)
      : memory_(std::move(memory)), streams_(std::make_shared<Streams>(device)) {}

  SpanPtr reserve(std::int64_t numel, at::ScalarType dtype) override {
    return std::make_shared<MemorySpan>(memory_->allocate(numel, dtype), streams_);
  }

 private:
  std::shared_ptr<HostMemory> memory_;
  std::shared_ptr<Streams> streams_;
};

}  // namespace

SpanPtr resident(const at::Tensor& tensor) {
  POISE_CHECK(tensor.dim() == 1 && tensor.is_contiguous());
  return std::make_shared<MemorySpan>(tensor, std::make_shared<Streams>(tensor.device()));
}

std::shared_ptr<Store> host_store(std::shared_ptr<HostMemory> memory, c10::Device device) {
  return std::make_shared<HostStore>(std::move(memory), device);
}

}  // namespace poise::offload
