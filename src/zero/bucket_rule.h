// Which flats that follow each other share a collective. Whole numbers alone: the planner counts by
// the same rule.
#pragma once

#include <cstdint>
#include <vector>

namespace poise::zero {

inline constexpr std::int64_t kBucketBytes = 256 * 1024;  // in fp32, at most

// A flat that is to travel.
struct Load {
  std::int64_t numel = 0;  // of all ranks, with padding; 0: it travels nowhere
  int type = 0;            // that it travels in
};

// Of loads in the order in which they travel, the places of those that share a collective: two or
// more in each. What travels nowhere is in none, and parts none.
std::vector<std::vector<int>> shared_collectives(const std::vector<Load>& loads);

}  // namespace poise::zero
