// Written for torch 2.11.
#include "comm/c10d_calls.h"

#include <c10/util/Exception.h>

#include <utility>

#include "poise/error.h"

namespace poise::comm::c10d_calls {

BackendPtr backend_for(::c10d::ProcessGroup& group, c10::Device device) {
  std::string devices;
  for (const c10::Device& one : group.getDeviceTypes()) {
    if (one.type() == device.type()) return group.getBackend(device.type());
    devices = join(devices, devices.empty() ? "" : ", ", one.str());
  }
  fail("comm", "the process group carries no tensors on ", device.str(),
       "; it has: ", devices.empty() ? "nothing" : devices,
       "; make it with init_process_group(\"cpu:gloo,cuda:nccl\")");
}

BackendPtr gloo_of(::c10d::ProcessGroup& group) {
  for (const c10::Device& one : group.getDeviceTypes()) {
    if (!one.is_cpu()) continue;
    auto backend = group.getBackend(one.type());
    if (backend->getBackendName() == "gloo") return backend;
  }
  return {};
}

StorePtr store_of(::c10d::ProcessGroup& group) { return group.getStore(); }

WorkPtr send(::c10d::Backend& backend, at::Tensor bytes, int peer, int tag) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  return backend.send(tensors, peer, tag);
}

WorkPtr receive(::c10d::Backend& backend, at::Tensor bytes, int peer, int tag) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  return backend.recv(tensors, peer, tag);
}

WorkPtr all_gather(::c10d::Backend& backend, at::Tensor whole, at::Tensor mine) {
  return backend._allgather_base(whole, mine);
}

WorkPtr reduce_scatter(::c10d::Backend& backend, at::Tensor mine, at::Tensor whole) {
  return backend._reduce_scatter_base(mine, whole);  // SUM is the default
}

WorkPtr all_reduce(::c10d::Backend& backend, at::Tensor values) {
  std::vector<at::Tensor> tensors{std::move(values)};
  return backend.allreduce(tensors);  // SUM is the default
}

WorkPtr all_to_all(::c10d::Backend& backend, at::Tensor received, at::Tensor sent) {
  std::vector<std::int64_t> equal;  // empty: equal pieces
  return backend.alltoall_base(received, sent, equal, equal);
}

WorkPtr broadcast(::c10d::Backend& backend, at::Tensor values, int root) {
  std::vector<at::Tensor> tensors{std::move(values)};
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  return backend.broadcast(tensors, options);
}

bool blames_a_peer(const std::exception& error) {
  // A connection that a peer refuses is a call of the system that failed; the id is rank 0's.
  const auto message = message_of(error);
  const auto says = [&](const char* text) { return message.find(text) != std::string::npos; };
  return says("ncclRemoteError") || says("ncclSystemError") || says("retrieving ncclUniqueId");
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace poise::comm::c10d_calls
