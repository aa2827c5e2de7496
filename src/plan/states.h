// Cuts of flats over ranks, as zero makes them.
#pragma once

#include "poise/plan.h"

namespace poise::plan {

inline constexpr std::int64_t kAlignment = 256;  // elements; every tensor and shard starts at one

// What is split over the ranks.
struct Split {
  bool optimizer = false, gradients = false, parameters = false;
};
Split split_of(const Choice& choice);

// Elements of one rank's shard of a flat, and of the flat padded to equal shards.
std::int64_t shard(std::int64_t elements, int ranks);
std::int64_t whole(std::int64_t elements, int ranks);

}  // namespace poise::plan
