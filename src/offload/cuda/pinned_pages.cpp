// Not torch's own pinned memory: that rounds up to a power of two, and never gives anything back.
#include "offload/pinned_pages.h"

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

namespace poise::offload {

std::string pin_pages(void* data, std::size_t bytes, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const auto status = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (status == cudaSuccess) return "";
  static_cast<void>(cudaGetLastError());  // or the next launch would report it
  return cudaGetErrorString(status);
}

void unpin_pages(void* data, c10::Device device) noexcept {
  try {
    const c10::cuda::CUDAGuard guard(device);
    static_cast<void>(cudaDeviceSynchronize());
    static_cast<void>(cudaHostUnregister(data));
    static_cast<void>(cudaGetLastError());
  } catch (const std::exception&) {  // the driver is gone, as at the end of the process
  }
}

}  // namespace poise::offload
