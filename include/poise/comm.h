// Collectives on a group of ranks: one rank, threads of one process, or any c10d process group
// (gloo, NCCL) made by Python or from pure C++. Only sums go over the wire: NCCL's AVG and PREMUL
// have been wrong in several releases, and division comes later anyway.
//
// Bits: on CPU groups a reduction is an fp32 sum in rank order (x0 + x1 + ...), the same on every
// run, for any number of threads and in every kind of group.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "poise/export.h"
#include "poise/stream.h"

namespace c10d {
class ProcessGroup;
}

namespace poise::comm {

enum class Kind { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier };
inline constexpr int kKinds = 6;
POISE_API const char* name_of(Kind kind);

// What this rank handed to the group since the last reset. `bytes` are what it must send in theory:
// (W-1)/W of the whole for gather, scatter and all-to-all, twice that for all_reduce, the whole for
// broadcast at the root.
struct Traffic {
  std::array<std::int64_t, kKinds> calls{};
  std::array<std::int64_t, kKinds> bytes{};
};

struct Options {
  std::chrono::milliseconds timeout{1800 * 1000};  // a wait for peers ends here with an Error
  // What errors call each rank, where the group is a part of a world: its number there. Empty: as
  // it is.
  std::vector<int> names = {};
  // A process group of torch's that was made for this one: it ends with it, once all ranks have
  // come to their end. Gloo's needs no end.
  bool owns_process_group = false;
};

class Backend;

// This rank's end of a group. Collectives run in order of submission on a stream of the group's own
// and hand back an Event; their tensors must stay untouched until its wait(). All ranks submit the
// same sequence. Tensors are contiguous, 1-D, on the group's device; equal sizes on all ranks.
// `what` names the unit or value in errors, and is compared between ranks where the backend can.
// Nothing is allocated after reserve(). One thread at a time drives a Group.
//
// A failure of any rank (abort(), a timeout, a lost peer, a mismatch) makes this and every later
// wait throw Error with the first message; the group is then of no more use.
class POISE_API Group {
 public:
  Group(std::unique_ptr<Backend> backend, int rank, int size, c10::Device device);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  c10::Device device() const;
  std::string backend() const;  // "one rank", "threads", "gloo", "nccl", "fake"

  // whole: [W x n]; mine: [n], may be this rank's piece of `whole` itself. Any dtype.
  Event all_gather(at::Tensor whole, at::Tensor mine, std::string what);
  // whole: [W x n] fp32, bf16 or fp16; mine: [n] fp32, this rank's piece of the sum over ranks; may
  // be this rank's piece of `whole`. `whole` is scratch afterwards.
  Event reduce_scatter(at::Tensor mine, at::Tensor whole, std::string what);
  Event all_reduce(at::Tensor values, std::string what);  // fp32 or fp64, in place
  Event all_to_all(at::Tensor received, at::Tensor sent, std::string what);  // [W x n] each
  Event broadcast(at::Tensor values, int root, std::string what);
  void barrier(std::string what);  // blocks

  // Each rank's text, by rank. Blocks. For names and hashes at build, not for a step.
  std::vector<std::string> all_gather_text(const std::string& text, const std::string& what);

  // Short texts that ranks leave for each other beside the collectives, by any thread at any time:
  // a later one takes the place of the one with its key. nullopt: no rank has left one yet. Throws
  // Error where the store that keeps them is gone.
  void leave_note(const std::string& key, const std::string& text);
  std::optional<std::string> note(const std::string& key) const;

  // Makes room for reductions of up to `bytes` of `whole`, under the caller's AccountScope.
  void reserve(std::int64_t bytes);
  void reserve_all_reduce(std::int64_t bytes);  // for one of up to `bytes`

  // Throws the failure, if there is one. On CUDA collectives of a failed group end without their
  // result: call this after waiting for the device, before using what they brought.
  void check() const;

  // Ends the group on every rank with this message (this rank's failure), and what this rank has in
  // flight: afterwards its tensors are its own again. Does not throw.
  void abort(const std::string& message) noexcept;

  Traffic traffic() const;
  void reset_traffic();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The ranks of a training. Sharding happens inside `shard`; where that is not all of them, its
// equals in the other shard groups are `replica`: rank = replica rank x shard size + shard rank
// (shard inside a node, replicate across nodes). Null: `shard` is `all`, `replica` this rank alone.
struct Ranks {
  std::shared_ptr<Group> all;
  std::shared_ptr<Group> shard;
  std::shared_ptr<Group> replica;
};

// A group of one: no call reaches a backend.
POISE_API std::shared_ptr<Group> one_rank(c10::Device device = c10::Device(c10::kCPU));

// Ranks are threads of this process: one handle for each. The oracle of the other kinds.
POISE_API std::vector<std::shared_ptr<Group>> threads(int size, Options options = {});

// Of the NCCL that torch brought; empty in a build without CUDA.
POISE_API std::string nccl_version();

// Around a process group of torch's. `device`: where its tensors live. Throws Error where the
// group's backend cannot carry tensors of that device.
POISE_API std::shared_ptr<Group> from_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                    c10::Device device, Options options = {});

// What torchrun, Slurm or mpirun said of this process in the environment.
struct Place {
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;  // among the processes of this machine
  std::string address;            // host of rank 0, where the ranks meet; empty for one rank
  int port = 0;
  bool store_runs = false;  // torchrun listens there already
};
// nullopt: started by hand. Throws Error on a half-set or contradictory environment.
POISE_API std::optional<Place> place_from_environment();

// The group that torchrun, Slurm or mpirun started this process for: rank and address from the
// environment, NCCL where every local rank has a GPU, else gloo. Without such a launcher: one rank.
// Throws Error on a half-set or contradictory environment, a port in use, a peer that does not
// come.
POISE_API std::shared_ptr<Group> from_environment(Options options = {});

// The same with groups for sharding inside blocks of `shard_size` ranks (those of a node), and
// replication across them; 0 or the number of ranks: one block. Throws Error where it does not
// divide the ranks.
POISE_API Ranks ranks_from_environment(int shard_size, Options options = {});

// Rank `rank` of a world of `size` that is not there: counts calls and bytes and checks shapes,
// moves nothing (each piece of a gather is a copy of `mine`). For layouts of large worlds.
POISE_API std::shared_ptr<Group> fake(int rank, int size,
                                      c10::Device device = c10::Device(c10::kCPU));

}  // namespace poise::comm
