// What errors call the ranks of a group: by their numbers in the world that it is a part of.
#pragma once

#include <utility>
#include <vector>

#include "poise/error.h"

namespace poise::comm {

class Numbers {
 public:
  Numbers() = default;  // as the group has them
  Numbers(std::vector<int> in_world, int size) : in_world_(std::move(in_world)) {
    if (in_world_.empty() || static_cast<int>(in_world_.size()) == size) return;
    fail("comm", in_world_.size(), " names for a group of ", size, " ranks; give one for each");
  }

  int of(int rank) const {
    return in_world_.empty() ? rank : in_world_[static_cast<std::size_t>(rank)];
  }

 private:
  std::vector<int> in_world_;
};

}  // namespace poise::comm
