// Stands in for CUDA's header of this name where kernels/cuda is compiled for the CPU: as much of
// CUDA as the kernels use. The threads of a block are fibres that switch at barriers and shuffles;
// blocks run one after the other, at once when they are launched. What CUDA leaves undefined is an
// error here (cuda_on_cpu/device.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static  // holds what the block before left there

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorUnknown };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

const char* cudaGetErrorString(cudaError_t status);  // of cudaErrorUnknown: the last fault
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream);

namespace poise::kernels::cuda_on_cpu {
using Site = std::source_location;

// Runs `thread` as every thread of every block.
cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& thread);
std::uint64_t shuffle_down(unsigned mask, std::uint64_t value, unsigned delta, int width,
                           const Site& site);
}  // namespace poise::kernels::cuda_on_cpu

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> kept(arguments...);
  return poise::kernels::cuda_on_cpu::launch(*config, [&] { std::apply(kernel, kept); });
}

void __syncthreads(const std::source_location& site = std::source_location::current());

template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32,
                       const std::source_location& site = std::source_location::current()) {
  static_assert(sizeof(Value) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = poise::kernels::cuda_on_cpu::shuffle_down(mask, bits, delta, width, site);
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

// Nothing runs at the same time: a fibre gives way at barriers and shuffles only.
inline unsigned atomicMax(unsigned* place, unsigned value) {
  const unsigned old = *place;
  *place = std::max(old, value);
  return old;
}
