// Twin of cuda/make_nccl.cpp in builds without CUDA.
#include "comm/make_backend.h"
#include "poise/comm.h"
#include "poise/error.h"

namespace poise::comm {

int nccl_devices() { return 0; }
std::string nccl_version() { return ""; }
std::string nccl_device_id(int) { return ""; }

c10d_calls::BackendPtr make_nccl(const c10d_calls::StorePtr&, int, int, c10::Device device,
                                 std::chrono::milliseconds) {
  fail("comm", "no NCCL for device: ", device.str(),
       "; this build of poise has no CUDA, build it with nvcc and a CUDA build of torch");
}

}  // namespace poise::comm
