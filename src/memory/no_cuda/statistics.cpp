// Twin of cuda/ in builds without CUDA.
#include "memory/gpu_allocations.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

[[noreturn]] void no_cuda() {
  fail("memory", "this build of poise has no CUDA; build it with nvcc and a CUDA build of torch");
}

}  // namespace

Snapshot cuda_snapshot(int) { no_cuda(); }
void reset_cuda_peak(int) { no_cuda(); }
void watch_gpu_allocations(c10::Device) { no_cuda(); }
void limit_gpu_memory(c10::Device, std::int64_t, const void*) { no_cuda(); }
void lift_gpu_limit(c10::Device, const void*) {}

}  // namespace poise::memory
