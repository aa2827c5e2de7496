// How the data of a collective gets from rank to rank on the CPU, once all have agreed on it:
// by messages, or, where every rank may read every other's memory, by reading it where it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/messages.h"
#include "comm/near.h"

namespace poise::comm {

// Functions block until this rank's part is over and throw PeerFailure and Stopped. Flat tensors.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // This rank's piece of `whole` is there already.
  virtual void all_gather(const at::Tensor& whole, const at::Tensor& mine) = 0;
  virtual void reduce_scatter(const at::Tensor& mine, const at::Tensor& whole) = 0;
  virtual void all_reduce(const at::Tensor& values) = 0;
  virtual void all_to_all(const at::Tensor& received, const at::Tensor& sent) = 0;
  virtual void broadcast(const at::Tensor& values, int root) = 0;
};

// This rank's place, and memory for reductions (see Backend::reserve), which may be made anew.
struct Seated {
  int rank = 0;
  int size = 1;
  const at::Tensor& scratch;
};

std::unique_ptr<Carrier> by_messages(const Seated& seated, Messages& messages, int tag);

// `records`: of the collective that all have agreed on; each shows the address that others read.
std::unique_ptr<Carrier> by_reading(const Seated& seated, NearRanks& near,
                                    std::vector<NearRanks::Record>& records);

// What is large goes in two rounds: each rank sums a segment of its own and hands it to the
// others. That moves 2 (W-1)/W times the bytes; in one round, all to all, it is W-1 times them.
inline constexpr std::int64_t kTwoRounds = 16384;  // bytes from which their latency is worth it
inline bool reduces_in_segments(std::int64_t bytes, int size) {
  return size > 2 && bytes >= kTwoRounds;
}

}  // namespace poise::comm
