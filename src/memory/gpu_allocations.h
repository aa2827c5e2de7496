// What torch's CUDA allocator gives out and takes back, in the books.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "memory/ledger_state.h"

namespace poise::memory {

// From now on its allocations go to the ledger of their thread's scope, or of AutogradScope, where
// that counts this device. An allocator that is not torch's own tells nothing, which is said once.
// Throws Error: no such GPU.
void watch_gpu_allocations(c10::Device device);

// The most that torch's allocator may take from the device; 0: all of it. In the name of `owner`.
// Throws Error.
void limit_gpu_memory(c10::Device device, std::int64_t bytes, const void* owner);
// All of it again, unless the limit is somebody else's by now.
void lift_gpu_limit(c10::Device device, const void* owner);

}  // namespace poise::memory
