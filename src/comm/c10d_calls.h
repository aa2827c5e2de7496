// Every name of torch.distributed's C++ side that has changed between releases, or may: the only
// sources that call a c10d::Backend are these. Sums only; nothing here waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <exception>
#include <string>

namespace poise::comm::c10d_calls {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// The backend that carries tensors of `device`; throws Error where there is none.
BackendPtr backend_for(::c10d::ProcessGroup& group, c10::Device device);
BackendPtr gloo_of(::c10d::ProcessGroup& group);  // null: none
StorePtr store_of(::c10d::ProcessGroup& group);   // null: none

WorkPtr send(::c10d::Backend& backend, at::Tensor bytes, int peer, int tag);
WorkPtr receive(::c10d::Backend& backend, at::Tensor bytes, int peer, int tag);

WorkPtr all_gather(::c10d::Backend& backend, at::Tensor whole, at::Tensor mine);
WorkPtr reduce_scatter(::c10d::Backend& backend, at::Tensor mine, at::Tensor whole);
WorkPtr all_reduce(::c10d::Backend& backend, at::Tensor values);
WorkPtr all_to_all(::c10d::Backend& backend, at::Tensor received, at::Tensor sent);
WorkPtr broadcast(::c10d::Backend& backend, at::Tensor values, int root);

// Whether NCCL failed because of another rank, or may have.
bool blames_a_peer(const std::exception& error);

// What torch said, without its C++ stack.
std::string message_of(const std::exception& error);

}  // namespace poise::comm::c10d_calls
