// Which elements of each flat belong to which rank, and what a rank keeps of them. Cuts depend on
// the flat and the number of ranks only, never on stage, bucket or dtype.
#pragma once

#include <cstdint>

#include "poise/config.h"
#include "poise/core.h"

namespace poise::zero {

// Elements [begin, end) of a flat.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};
// What two ranges share; where they do not meet, nothing at the start of the second.
Range overlap(Range a, Range b);

// What is split over the ranks: the stages of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
// A world of one splits nothing, whatever its stage, unless its parameters are offloaded.
class Shards {
 public:
  // `offloaded`: parameters live elsewhere, so a world of one gathers its units, too, as at
  // stage 3.
  Shards(const ParamTable& table, const config::ZeroPolicy& policy, int rank, int size,
         bool offloaded = false);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool splits_optimizer() const { return stage_ >= 1; }
  bool splits_gradients() const { return stage_ >= 2 && every_; }
  bool splits_parameters() const { return stage_ >= 3; }
  bool splits_parameters(int flat) const {  // small ones stay whole
    return stage_ >= 3 && !table_.flats()[static_cast<std::size_t>(flat)].small;
  }
  // Whether gradients are joined in every micro-batch, or once per window.
  bool reduces_every_micro_batch() const { return every_; }

  // Elements of a flat with its padding: equal shards for all ranks, each a multiple of
  // ParamTable::kAlignment, so the last ranks' may be padding alone.
  std::int64_t whole(int flat) const { return shard(flat) * size_; }
  std::int64_t shard(int flat) const;
  Range mine(int flat) const { return {shard(flat) * rank_, shard(flat) * (rank_ + 1)}; }
  // What this rank's optimizer updates.
  Range optimized(int flat) const {
    return splits_optimizer() ? mine(flat) : Range{0, whole(flat)};
  }

 private:
  const ParamTable& table_;
  int rank_;
  int size_;
  int stage_;
  bool every_;
};

}  // namespace poise::zero
