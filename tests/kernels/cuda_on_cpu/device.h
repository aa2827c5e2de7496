// The GPU that kernels/cuda runs on where it is compiled for the CPU (cuda_runtime.h beside this).
#pragma once

#include <cstddef>
#include <string>

#include "kernels/launch.h"

namespace poise::kernels::cuda_on_cpu {

enum class Order { forwards, backwards };  // of the threads of a block, and of the blocks

// How kernels run while it lives. Wrong results under one of the orders are a race. `most_blocks`:
// larger grids are cut, which a kernel that walks its work in strides of the grid does not mind.
class Device {
 public:
  explicit Device(Order order, unsigned most_blocks = 65536);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // On the one stream that calls must be made on, of a device that is not the current one at first.
  static Launch launch();
  // What was done first, since the last call, that CUDA leaves undefined or refuses; memory that is
  // not freed, too. Empty: nothing. Calls also return an error, as far as CUDA's do.
  static std::string fault();
  // Whether there is no memory.
  static void set_full(bool full);
};

// Memory that ends where a page begins that nobody may touch. Its bytes are all ones: NaNs,
// negative numbers. What is written before its begin is a fault when it is freed.
void* guarded_memory(std::size_t bytes);
void free_guarded_memory(void* data);

// For the parts of the emulation.
void set_fault(const std::string& what);
void check_stream(const void* stream);
std::size_t arrays_on_device();
void* allocate_on_device(std::size_t bytes, void* stream);  // throws std::bad_alloc
void free_on_device(void* data);

}  // namespace poise::kernels::cuda_on_cpu
