// Stands in for cuda/launch.cpp where CUDA was not compiled.
#include "core/launch.h"
#include "poise/error.h"

namespace poise::cuda {

void* current_stream(const c10::Device& device) {
  fail("core", "this build has no CUDA support: ", device.str(),
       "; build with -DPOISE_CUDA=ON (needs nvcc and a CUDA torch) or keep the model on the CPU");
}

void* allocate(std::size_t, void*) { return nullptr; }  // nobody has such a stream
void release(void*) {}

}  // namespace poise::cuda
