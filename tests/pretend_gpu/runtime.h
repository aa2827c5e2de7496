// What the parts of the stand-in for libcudart share.
#pragma once

#include <driver_types.h>

#include <cstddef>

namespace pretend_gpu {

inline constexpr std::size_t kDeviceBytes = std::size_t{2} << 30;

// One lock for everything: which thread comes first must not matter to a program, and calls are
// few.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};
// With the lock held: lets other threads and processes do something first.
void let_others();

// Notes the error for cudaGetLastError and returns it.
cudaError_t failed(cudaError_t error);

int device_of_stream(cudaStream_t stream);
void reach_all();  // everything that is queued anywhere

// A number below `bound`: by PRETEND_GPU_SEED, or from a fixed row of numbers where it is not set.
unsigned random_below(unsigned bound);
// Whether what is queued sometimes happens early (PRETEND_GPU_SEED is set) or always late.
bool sometimes_early();

}  // namespace pretend_gpu
