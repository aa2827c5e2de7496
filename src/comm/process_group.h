// Groups over several processes, of what c10d and a store provide.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/c10d_calls.h"
#include "comm/numbers.h"
#include "comm/watch.h"
#include "poise/comm.h"

namespace poise::comm {

struct Peers {
  c10d_calls::BackendPtr backend;  // "gloo" for the CPU, "nccl" for CUDA
  c10d_calls::StorePtr store;      // shared with others; null: failures show by timeout only
  int rank = 0;
  int size = 1;
  Numbers numbers = {};
  std::vector<std::string> names = {};  // see Watched
  c10::Device device = c10::Device(c10::kCPU);
  bool owns_backend = false;         // nobody else will end it
  c10d_calls::BackendPtr gloo = {};  // beside "nccl", where the process group has both
};

// What a rank has of its group before there is a backend, which may take long or fail: a part of
// the store, and the watch, by which the others see from here on whether it lives.
struct Seat {
  int instance = 0;  // numbers the groups that share a backend
  c10d_calls::StorePtr store;
  std::unique_ptr<Watch> watch;  // null without a store
};
// Throws Error where the store is out of reach.
Seat take_seat(const Peers& peers, WatchSettings settings);

std::shared_ptr<Group> group_of(const Peers& peers, Seat seat, Options options);
std::shared_ptr<Group> group_of(const Peers& peers, Options options, WatchSettings settings);

// Tensors on the CPU over messages of gloo.
std::unique_ptr<Backend> on_cpu(const Peers& peers, Seat seat, Options options);
// Tensors on a GPU over NCCL.
std::unique_ptr<Backend> on_gpu(const Peers& peers, Seat seat, const Options& options);

}  // namespace poise::comm
