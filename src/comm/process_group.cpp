// Chooses what carries a group of processes, and gives it a part of the store of its own.
#include "comm/process_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backend.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

// How many groups this rank has made with this store before. The ranks make them in one order.
int next_instance(const Peers& peers) {
  if (!peers.store) return 0;
  return static_cast<int>(peers.store->add(join("poise/groups/", peers.rank), 1)) - 1;
}

// A connection of its own where the store can give one.
c10d_calls::StorePtr own_connection(const c10d_calls::StorePtr& store, const std::string& prefix) {
  if (!store) return store;
  return c10::make_intrusive<::c10d::PrefixStore>(prefix, store->clone());
}

}  // namespace

std::shared_ptr<Group> group_of(const Peers& peers, Options options, WatchSettings settings) {
  const std::string name = peers.backend->getBackendName();
  const char* wanted = peers.device.is_cpu() ? "gloo" : "nccl";
  if (name != wanted) {
    fail("comm", "the process group carries tensors on ", peers.device.str(), " over ", name,
         "; poise needs ", wanted, " there");
  }
  const auto wrapped = [&](std::unique_ptr<Backend> backend) {
    return std::make_shared<Group>(std::move(backend), peers.rank, peers.size, peers.device);
  };
  if (peers.size == 1) return wrapped(alone(name));
  try {
    const int instance = next_instance(peers);
    Peers own = peers;
    own.store = own_connection(peers.store, join("poise/group/", instance));
    return wrapped(peers.device.is_cpu() ? on_cpu(own, instance, options, settings)
                                         : on_gpu(own, settings));
  } catch (const c10::Error& error) {
    fail("comm", "cannot reach the store of the group: ", c10d_calls::message_of(error),
         "; is rank 0 still running?");
  }
}

std::shared_ptr<Group> from_process_group(c10::intrusive_ptr<::c10d::ProcessGroup> group,
                                          c10::Device device, Options options) {
  if (!group) fail("comm", "no process group: null; call init_process_group first");
  const Peers peers{c10d_calls::backend_for(*group, device), c10d_calls::store_of(*group),
                    group->getRank(), group->getSize(), device};
  return group_of(peers, options, {});
}

}  // namespace poise::comm
