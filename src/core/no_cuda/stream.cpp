// Twin of cuda/stream.cpp in builds without CUDA.
#include "core/stream_backend.h"
#include "poise/error.h"

namespace poise {

std::unique_ptr<StreamBackend> make_cuda_stream(c10::Device device) {
  fail("core", "no streams for device: ", device.str(),
       "; this build of poise has no CUDA, build it with nvcc and a CUDA build of torch");
}

}  // namespace poise
