// The group that this process was launched for.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "comm/apart.h"
#include "comm/backend.h"
#include "comm/beat.h"
#include "comm/launch.h"
#include "comm/make_backend.h"
#include "comm/process_group.h"
#include "comm/rendezvous.h"
#include "poise/error.h"
#include "poise/interrupt.h"
#include "poise/log.h"

namespace poise::comm {
namespace {

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

// What is thrown where this is called, an interrupt too.
std::string reason() {
  try {
    throw;
  } catch (const Interrupted& interrupted) {
    return join("ended by signal ", interrupted.signal);
  } catch (const std::exception& error) {
    return c10d_calls::message_of(error);
  } catch (...) {
    return "an exception of unknown type";
  }
}

// The others would wait for this rank.
void publish(Watch& watch, int rank, const std::string& why) {
  watch.publish(join("[comm] ", watch.name_of(rank), " ended the group: ", why));
}

// Throws c10::Error where the store is lost; one that does not answer may be there.
void look_for(const c10d_calls::StorePtr& store) {
  auto answer = apart([store] { return store->check({"roll"}); });
  const auto waited = answer.wait_for(WatchSettings().answer);
  if (waited == std::future_status::ready) answer.get();
}

// Says to all which process this rank is and which GPU it has, in two lines; hands back what all
// said. A rank that came and died since, while its GPU woke up for example, is not waited for.
std::vector<std::string> call_roll(const Launch& launch, std::chrono::milliseconds timeout,
                                   const c10d_calls::StorePtr& store) {
  const auto watch = watch_meeting(store, launch);
  bool first_came = false;  // which holds the store
  const auto check = [&] {
    watch->check();
    first_came = first_came || watch->awaited().value_or(launch.size) > 0;
  };
  try {
    const auto gpu = gpu_of(launch);
    const auto mine = join(own_name(), '\n', gpu ? nccl_device_id(*gpu) : kNone);
    return roll_call(store, launch, mine, timeout, check);
  } catch (const c10::Error& error) {
    if (first_came) lost_store(launch, error);
    throw;
  } catch (const Error& error) {
    if (!first_came) look_for(store);  // a lost one has an error of its own
    publish(*watch, launch.rank, error.what());
    throw;
  } catch (...) {
    publish(*watch, launch.rank, reason());
    throw;
  }
}

std::vector<std::string> meet_all(const Launch& launch, std::chrono::milliseconds timeout,
                                  c10d_calls::StorePtr& store) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    try {
      store = meet(launch, timeout);
      return call_roll(launch, timeout, store);
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
  std::vector<std::string> names;  // host and pid of each
  bool on_gpus = false;            // NCCL only where all have a GPU: the ranks must agree
};

Met meet_peers(const Launch& launch, std::chrono::milliseconds timeout) {
  Met met{launch, {}, {}, false};
  std::vector<std::string> gpus;
  for (const auto& said : meet_all(launch, timeout, met.store)) {
    const auto end = said.find('\n');
    met.names.push_back(said.substr(0, end));
    gpus.push_back(said.substr(end + 1));
  }
  met.on_gpus = all_have_their_own(std::move(gpus), launch);
  return met;
}

// All of them, or a part, for which ranks are named by their numbers among all.
struct Part {
  std::string name;  // of its part of the store
  int rank = 0;
  std::vector<int> ranks;
};

// The whole, and where they shard in blocks this rank's block and its equals in the other ones.
std::vector<Part> parts_of(const Launch& launch, int shard_size) {
  const auto every = [](int first, int step, int count) {
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
    return ranks;
  };
  const Part whole{"", launch.rank, every(0, 1, launch.size)};
  if (shard_size == 0 || shard_size == launch.size) return {whole};
  const int block = launch.rank / shard_size, place = launch.rank % shard_size;
  return {whole,
          {join("shard/", block), place, every(block * shard_size, 1, shard_size)},
          {join("replica/", place), block, every(place, shard_size, launch.size / shard_size)}};
}

// A part's members, but for the backend.
struct Members {
  Peers peers;
  Seat seat;
};

Members seat_of(const Met& met, const Part& part) {
  Members members;
  auto& peers = members.peers;
  peers.rank = part.rank;
  peers.size = static_cast<int>(part.ranks.size());
  if (met.on_gpus) {
    peers.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(*gpu_of(met.launch)));
  }
  if (peers.size == 1) return members;
  peers.owns_backend = true;
  peers.numbers = Numbers(part.ranks, peers.size);
  for (const int rank : part.ranks) {
    peers.names.push_back(met.names[static_cast<std::size_t>(rank)]);
  }
  peers.store = met.store;
  if (!part.name.empty()) {
    peers.store = c10::make_intrusive<::c10d::PrefixStore>(part.name, met.store);
  }
  WatchSettings settings;
  if (met.on_gpus || (met.launch.rank == 0 && !met.launch.store_runs)) settings.linger = kLinger;
  members.seat = take_seat(peers, settings);
  return members;
}

c10d_calls::BackendPtr make_backend(const Met& met, const Peers& peers, Watch& watch,
                                    std::chrono::milliseconds timeout) {
  const auto check = [&] {
    check_interrupt();
    watch.check();
  };
  try {
    if (met.on_gpus) return make_nccl(peers.store, peers.rank, peers.size, peers.device, timeout);
    return make_gloo(peers.store, peers.rank, peers.size, own_address(met.launch), timeout, check);
  } catch (const c10::Error& error) {
    lost_store(met.launch, error);
  }
}

std::shared_ptr<Group> make_group(const Met& met, Members& members, const Options& options) {
  auto& [peers, seat] = members;
  if (peers.size == 1) return one_rank(peers.device);
  peers.backend = make_backend(met, peers, *seat.watch, options.timeout);
  return group_of(peers, std::move(seat), options);
}

std::vector<std::shared_ptr<Group>> make_groups(const Met& met, const std::vector<Part>& parts,
                                                const Options& options) {
  std::vector<Members> members;
  std::vector<std::shared_ptr<Group>> groups;
  try {
    for (const auto& part : parts) members.push_back(seat_of(met, part));
    for (auto& part : members) groups.push_back(make_group(met, part, options));
  } catch (...) {
    // Some wait for this rank in the groups that it has made, others in those that come next.
    const auto why = reason();
    for (const auto& part : members) {
      if (part.seat.watch) publish(*part.seat.watch, part.peers.rank, why);
    }
    for (const auto& group : groups) group->abort(why);
    throw;
  }
  return groups;
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
  auto groups = make_groups(met, parts_of(*launch, shard_size), options);
  groups.resize(3);
  return {groups[0], groups[1], groups[2]};
}

}  // namespace poise::comm
