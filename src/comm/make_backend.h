// c10d backends from pure C++.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "comm/c10d_calls.h"

namespace poise::comm {

// `address`: of this machine, where its peers find it. GLOO_SOCKET_IFNAME names an interface
// instead. `check` is called while it waits for peers, and ends that by what it throws. Throws
// c10::Error where the store is lost.
c10d_calls::BackendPtr make_gloo(
    const c10d_calls::StorePtr& store, int rank, int size, const std::string& address,
    std::chrono::milliseconds timeout, std::function<void()> check = [] {});

// GPUs that NCCL may use here; 0 where this build or this machine has none.
int nccl_devices();
// Another one for each GPU, on all machines.
std::string nccl_device_id(int index);
// On the current device. Throws Error in a build without CUDA.
c10d_calls::BackendPtr make_nccl(const c10d_calls::StorePtr& store, int rank, int size,
                                 c10::Device device, std::chrono::milliseconds timeout);

}  // namespace poise::comm
