// From torch's nouns to those of the kernels: where a kernel runs and what its elements are.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>

#include "kernels/launch.h"
#include "poise/export.h"

namespace poise {

// CPU: torch's intra-op threads. CUDA: the current stream of that device. Throws Error on others.
POISE_API kernels::Launch launch_for(const c10::Device& device);

// Throws Error on a type that is not fp32, bf16 or fp16.
POISE_API kernels::DType kernel_dtype(c10::ScalarType type);

namespace cuda {
// A cudaStream_t. Defined in cuda/ or no_cuda/ (where it throws Error).
void* current_stream(const c10::Device& device);
// By torch's allocator, which frees what it keeps for later before it says that there is no more.
void* allocate(std::size_t bytes, void* stream);
void release(void* data);
}  // namespace cuda

}  // namespace poise
