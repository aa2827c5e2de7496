// What torch has for a kernel of this thread: a stream and memory.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "core/launch.h"

namespace poise::cuda {

void* current_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

void* allocate(std::size_t bytes, void* stream) {
  return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes,
                                                                static_cast<cudaStream_t>(stream));
}

void release(void* data) { c10::cuda::CUDACachingAllocator::raw_delete(data); }

}  // namespace poise::cuda
