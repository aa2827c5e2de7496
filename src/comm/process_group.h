// Groups over several processes, of what c10d and a store provide.
#pragma once

#include <memory>

#include "comm/c10d_calls.h"
#include "comm/watch.h"
#include "poise/comm.h"

namespace poise::comm {

struct Peers {
  c10d_calls::BackendPtr backend;  // "gloo" for the CPU, "nccl" for CUDA
  c10d_calls::StorePtr store;      // shared with others; null: failures show by timeout only
  int rank = 0;
  int size = 1;
  c10::Device device = c10::Device(c10::kCPU);
  bool owns_backend = false;  // nobody else will end it
};

std::shared_ptr<Group> group_of(const Peers& peers, Options options, WatchSettings settings);

// Tensors on the CPU over messages of gloo. `instance` numbers the groups that share a backend.
std::unique_ptr<Backend> on_cpu(const Peers& peers, int instance, Options options,
                                WatchSettings settings);
// Tensors on a GPU over NCCL.
std::unique_ptr<Backend> on_gpu(const Peers& peers, WatchSettings settings);

}  // namespace poise::comm
