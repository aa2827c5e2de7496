// The group that this process was launched for.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "comm/backend.h"
#include "comm/launch.h"
#include "comm/make_backend.h"
#include "comm/process_group.h"
#include "comm/rendezvous.h"
#include "poise/error.h"
#include "poise/log.h"

namespace poise::comm {
namespace {

constexpr std::chrono::seconds kLinger{10};

// The GPU of this rank. Some launchers show each rank its own alone (Slurm's --gpus-per-task).
std::optional<int> gpu_of(const Launch& launch) {
  const int devices = nccl_devices();
  if (!launch.local_rank || devices == 0) return std::nullopt;
  if (devices == 1) return 0;
  return *launch.local_rank < devices ? launch.local_rank : std::nullopt;
}

constexpr const char* kNone = "cpu";

// Whether each rank has a GPU to itself.
bool all_have_their_own(std::vector<std::string> gpus, const Launch& launch) {
  if (std::count(gpus.begin(), gpus.end(), kNone) > 0) return false;
  std::sort(gpus.begin(), gpus.end());
  if (std::adjacent_find(gpus.begin(), gpus.end()) == gpus.end()) return true;
  if (launch.rank == 0) {
    log::warning(
        "[comm] some ranks see the same GPU, which NCCL does not allow: the group is on the CPU; "
        "start as many ranks as there are GPUs");
  }
  return false;
}

[[noreturn]] void lost_store(const Launch& launch, const c10::Error& error) {
  fail("comm", "lost the store at ", launch.address, ":", launch.port,
       " while the ranks met: ", c10d_calls::message_of(error), "; look at the output of rank 0");
}

// Says to all which GPU this rank has; hands back what all said.
std::vector<std::string> meet_all(const Launch& launch, std::chrono::milliseconds timeout,
                                  c10d_calls::StorePtr& store) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto gpu = gpu_of(launch);
  for (;;) {
    try {
      store = meet(launch, timeout);
      return roll_call(*store, launch, gpu ? nccl_device_id(*gpu) : kNone, timeout);
    } catch (const c10::Error& error) {
      // A store that closes may be that of rank 0's group before this one: the next will open.
      if (launch.store_runs || std::chrono::steady_clock::now() > deadline) {
        lost_store(launch, error);
      }
    }
  }
}

}  // namespace

std::optional<Place> place_from_environment() {
  const auto launch = launch_of([](const char* name) { return std::getenv(name); });
  if (!launch) return std::nullopt;
  return Place{launch->rank,    launch->size, launch->local_rank,
               launch->address, launch->port, launch->store_runs};
}

namespace {

// The ranks that were launched, once they have met.
struct Met {
  Launch launch;
  c10d_calls::StorePtr store;
  bool on_gpus = false;  // NCCL only where all have a GPU: the ranks must agree
};

Met meet_peers(const Launch& launch, std::chrono::milliseconds timeout) {
  Met met{launch, {}, false};
  met.on_gpus = all_have_their_own(meet_all(launch, timeout, met.store), launch);
  return met;
}

// The group of those that share the store's part `name`, as rank `rank` of `size`.
std::shared_ptr<Group> make_group(const Met& met, const std::string& name, int rank, int size,
                                  Options options) {
  Peers peers;
  peers.rank = rank;
  peers.size = size;
  if (met.on_gpus) {
    peers.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(*gpu_of(met.launch)));
  }
  if (size == 1) return one_rank(peers.device);
  peers.owns_backend = true;
  peers.store = met.store;
  if (!name.empty()) peers.store = c10::make_intrusive<::c10d::PrefixStore>(name, met.store);
  try {
    peers.backend =
        met.on_gpus ? make_nccl(peers.store, rank, size, peers.device, options.timeout)
                    : make_gloo(peers.store, rank, size, own_address(met.launch), options.timeout);
  } catch (const c10::Error& error) {
    lost_store(met.launch, error);
  }
  WatchSettings settings;
  if (met.on_gpus || (met.launch.rank == 0 && !met.launch.store_runs)) settings.linger = kLinger;
  return group_of(peers, options, settings);
}

std::shared_ptr<Group> alone(const std::optional<Launch>& launch) {
  const auto first = nccl_devices() > 0 ? std::optional<int>(0) : std::nullopt;
  const auto gpu = launch && launch->local_rank ? gpu_of(*launch) : first;
  return one_rank(gpu ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(*gpu))
                      : c10::Device(c10::kCPU));
}

}  // namespace

std::shared_ptr<Group> from_environment(Options options) {
  return ranks_from_environment(0, options).all;
}

Ranks ranks_from_environment(int shard_size, Options options) {
  const auto launch = launch_of([](const char* name) { return std::getenv(name); });
  const int size = launch ? launch->size : 1;
  if (shard_size < 0 || (shard_size > 0 && size % shard_size != 0)) {
    fail("comm", "shard groups of ", shard_size, " ranks do not divide the ", size,
         " ranks; choose a divisor, the ranks of a node for example, or 0 for one group");
  }
  if (size == 1) return {alone(launch), {}, {}};
  const auto met = meet_peers(*launch, options.timeout);
  Ranks ranks{make_group(met, "", launch->rank, size, options), {}, {}};
  if (shard_size == 0 || shard_size == size) return ranks;
  const int block = launch->rank / shard_size, place = launch->rank % shard_size;
  ranks.shard = make_group(met, join("shard/", block), place, shard_size, options);
  ranks.replica = make_group(met, join("replica/", place), block, size / shard_size, options);
  return ranks;
}

}  // namespace poise::comm
