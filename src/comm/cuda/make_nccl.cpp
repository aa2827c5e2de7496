// NCCL.
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <sstream>

#include "comm/make_backend.h"
#include "poise/comm.h"
#include "poise/error.h"

namespace poise::comm {

int nccl_devices() { return c10::cuda::device_count(); }

std::string nccl_version() { return ::c10d::getNcclVersion(); }

std::string nccl_device_id(int index) {
  cudaDeviceProp properties{};
  const auto result = cudaGetDeviceProperties(&properties, index);
  if (result != cudaSuccess) {
    fail("comm", "cannot use GPU ", index, ": ", cudaGetErrorString(result),
         "; nvidia-smi says more of it");
  }
  std::ostringstream id;
  id << "gpu-" << std::hex;
  for (const char byte : properties.uuid.bytes) id << (static_cast<int>(byte) & 0xFF) << '.';
  return id.str();
}

c10d_calls::BackendPtr make_nccl(const c10d_calls::StorePtr& store, int rank, int size,
                                 c10::Device device, std::chrono::milliseconds timeout) {
  using Nccl = ::c10d::ProcessGroupNCCL;
  const auto options = Nccl::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = timeout;
  try {
    c10::cuda::set_device(device.index());
    const auto backend = c10::make_intrusive<Nccl>(
        c10::make_intrusive<::c10d::PrefixStore>("nccl", store), rank, size, options);
    backend->setBoundDeviceId(device);
    return backend;
  } catch (const std::exception& error) {
    fail("comm", "rank ", rank, " cannot use NCCL on ", device.str(), ": ",
         c10d_calls::message_of(error), "; NCCL_DEBUG=INFO says more");
  }
}

}  // namespace poise::comm
