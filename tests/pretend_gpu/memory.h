// What streams need of memory.
#pragma once

#include <cstddef>

namespace pretend_gpu {

// Copies or fills between host memory and that of any device.
void copy_bytes(void* to, const void* from, std::size_t bytes);
void fill_bytes(void* to, int value, std::size_t bytes);

}  // namespace pretend_gpu
