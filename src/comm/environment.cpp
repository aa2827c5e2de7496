// The group that this process was launched for.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "comm/backend.h"
#include "comm/launch.h"
#include "comm/make_backend.h"
#include "comm/process_group.h"
#include "comm/rendezvous.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

constexpr std::chrono::seconds kLinger{10};

// "gpu" only where this rank has one to itself, as far as it can see.
bool has_gpu(const Launch& launch) {
  return launch.local_rank && *launch.local_rank < nccl_devices();
}

[[noreturn]] void lost_store(const Launch& launch, const c10::Error& error) {
  fail("comm", "lost the store at ", launch.address, ":", launch.port,
       " while the ranks met: ", c10d_calls::message_of(error), "; look at the output of rank 0");
}

// Says to all whether this rank has a GPU; hands back what all said.
std::vector<std::string> meet_all(const Launch& launch, std::chrono::milliseconds timeout,
                                  c10d_calls::StorePtr& store) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    try {
      store = meet(launch, timeout);
      return roll_call(*store, launch, has_gpu(launch) ? "gpu" : "cpu", timeout);
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

std::shared_ptr<Group> from_environment(Options options) {
  const auto launch = launch_of([](const char* name) { return std::getenv(name); });
  if (!launch || launch->size == 1) {
    const int index = launch && launch->local_rank ? *launch->local_rank : 0;
    const bool gpu = index < nccl_devices();
    return one_rank(gpu ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))
                        : c10::Device(c10::kCPU));
  }
  Peers peers;
  peers.rank = launch->rank;
  peers.size = launch->size;
  const auto roll = meet_all(*launch, options.timeout, peers.store);
  try {
    // NCCL only where all have a GPU: the ranks must agree.
    if (std::count(roll.begin(), roll.end(), "gpu") == launch->size) {
      peers.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(*launch->local_rank));
      peers.backend =
          make_nccl(peers.store, launch->rank, launch->size, peers.device, options.timeout);
    } else {
      peers.backend =
          make_gloo(peers.store, launch->rank, launch->size, own_address(*launch), options.timeout);
    }
  } catch (const c10::Error& error) {
    lost_store(*launch, error);
  }
  WatchSettings settings;
  if (launch->rank == 0 && !launch->store_runs) settings.linger = kLinger;
  return group_of(peers, options, settings);
}

}  // namespace poise::comm
