// Launches on torch's threads and streams.
#include "core/launch.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "poise/error.h"

namespace poise {
namespace {

// Splits by whole grains, which at::parallel_for itself does not promise.
void torch_parallel_for(std::int64_t count, std::int64_t grain, kernels::RangeBody body,
                        void* context) {
  const std::int64_t grains = (count + grain - 1) / grain;
  at::parallel_for(0, grains, 1, [&](std::int64_t begin, std::int64_t end) {
    body(context, begin * grain, std::min(end * grain, count));
  });
}

}  // namespace

kernels::Launch launch_for(const c10::Device& device) {
  kernels::Launch launch;
  if (device.is_cpu()) {
    launch.backend = kernels::Backend::cpu;
    launch.parallel_for = torch_parallel_for;
  } else if (device.is_cuda()) {
    launch.backend = kernels::Backend::cuda;
    launch.stream = cuda::current_stream(device);
    launch.device = device.index();
    launch.allocate = cuda::allocate;
    launch.release = cuda::release;
  } else {
    fail("core", "no kernels for device: ", device.str(), "; move the model to the CPU or to CUDA");
  }
  return launch;
}

kernels::DType kernel_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return kernels::DType::f32;
    case c10::ScalarType::BFloat16:
      return kernels::DType::bf16;
    case c10::ScalarType::Half:
      return kernels::DType::f16;
    default:
      fail("core", "no kernels for dtype: ", c10::toString(type),
           "; use float32, bfloat16 or float16");
  }
}

}  // namespace poise
