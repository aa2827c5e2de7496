// Chooses what carries a group of processes, and gives it a part of the store of its own.
#include "comm/process_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

#include "comm/backend.h"
#include "comm/store_answer.h"
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

Seat seat_in(const Peers& peers, WatchSettings settings) {
  Seat seat;
  seat.instance = next_instance(peers);
  seat.store = own_connection(peers.store, join("poise/group/", seat.instance));
  if (!seat.store) return seat;
  const Watched watched{peers.rank, peers.size, peers.numbers, peers.names};
  seat.watch = std::make_unique<Watch>(seat.store, watched, settings);
  return seat;
}

}  // namespace

// Nobody watches over these questions yet.
Seat take_seat(const Peers& peers, WatchSettings settings) {
  try {
    return store_answer([peers, settings] { return seat_in(peers, settings); });
  } catch (const c10::Error& error) {
    fail("comm", "cannot reach the store of the group: ", c10d_calls::message_of(error),
         "; is rank 0 still running?");
  }
}

std::shared_ptr<Group> group_of(const Peers& peers, Seat seat, Options options) {
  auto backend = peers.size == 1         ? alone(peers.backend->getBackendName())
                 : peers.device.is_cpu() ? on_cpu(peers, std::move(seat), std::move(options))
                                         : on_gpu(peers, std::move(seat), options);
  return std::make_shared<Group>(std::move(backend), peers.rank, peers.size, peers.device);
}

std::shared_ptr<Group> group_of(const Peers& peers, Options options, WatchSettings settings) {
  const std::string name = peers.backend->getBackendName();
  const char* wanted = peers.device.is_cpu() ? "gloo" : "nccl";
  if (name != wanted) {
    fail("comm", "the process group carries tensors on ", peers.device.str(), " over ", name,
         "; poise needs ", wanted, " there");
  }
  auto seat = peers.size > 1 ? take_seat(peers, settings) : Seat();
  return group_of(peers, std::move(seat), std::move(options));
}

std::shared_ptr<Group> from_process_group(c10::intrusive_ptr<::c10d::ProcessGroup> group,
                                          c10::Device device, Options options) {
  if (!group) fail("comm", "no process group: null; call init_process_group first");
  Peers peers{c10d_calls::backend_for(*group, device),
              c10d_calls::store_of(*group),
              group->getRank(),
              group->getSize(),
              Numbers(options.names, group->getSize()),
              {},
              device};
  WatchSettings settings;
  peers.owns_backend = options.owns_process_group;
  if (!device.is_cpu()) peers.gloo = c10d_calls::gloo_of(*group);
  if (peers.owns_backend && !device.is_cpu()) settings.linger = kLinger;
  return group_of(peers, std::move(options), settings);
}

}  // namespace poise::comm
