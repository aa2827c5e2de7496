// Collectives between pretend GPUs: a backend of torch.distributed that calls itself nccl and runs
// gloo's over the same memory, at once, after what the caller's stream has queued.
//
// At once, because two processes whose streams are emptied by their own waits would wait for each
// other where two GPUs do not.
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <utility>
#include <vector>

#include "pretend_gpu.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Gloo's own would write its results once more, whenever it is asked.
class Done final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(tensors, [&](Tensors& on_cpu) { return gloo_->allreduce(on_cpu, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(tensors, [&](Tensors& on_cpu) { return gloo_->broadcast(on_cpu, options); });
  }
  WorkPtr _allgather_base(at::Tensor& whole, at::Tensor& mine,
                          const c10d::AllgatherOptions& options) override {
    return run({whole, mine}, [&](Tensors& on_cpu) {
      return gloo_->_allgather_base(on_cpu[0], on_cpu[1], options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& mine, at::Tensor& whole,
                               const c10d::ReduceScatterOptions& options) override {
    return run({mine, whole}, [&](Tensors& on_cpu) {
      return gloo_->_reduce_scatter_base(on_cpu[0], on_cpu[1], options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& received, at::Tensor& sent, std::vector<std::int64_t>& out,
                        std::vector<std::int64_t>& in,
                        const c10d::AllToAllOptions& options) override {
    return run({received, sent}, [&](Tensors& on_cpu) {
      return gloo_->alltoall_base(on_cpu[0], on_cpu[1], out, in, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  // The tensors of one call are on one device, which NCCL makes the current one by itself.
  template <class Call>
  WorkPtr run(const Tensors& tensors, Call call) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && tensor.device() == tensors[0].device(),
                  "a collective of GPUs was given a tensor on ", tensor.device());
    }
    const c10::cuda::CUDAGuard guard(tensors[0].device());
    pretend_gpu::reach(c10::cuda::getCurrentCUDAStream().stream());
    const pretend_gpu::Kernel kernel(tensors[0].device().index());
    Tensors on_cpu;
    for (const auto& tensor : tensors) {
      on_cpu.push_back(at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                                     tensor.options().device(c10::kCPU)));
    }
    call(on_cpu)->wait();
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(pretend_gpu_collectives, module) {
  pybind11::module_::import("torch.distributed");
  module.def("over",
             [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
               return c10::make_intrusive<Collectives>(std::move(gloo));
             });
}
