// The stream that torch issues work of this thread on.
#include <c10/cuda/CUDAStream.h>

#include "core/launch.h"

namespace poise::cuda {

void* current_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace poise::cuda
