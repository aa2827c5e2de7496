// Four ranks (threads) in two shard groups of two.
#pragma once

#include <memory>
#include <vector>

#include "poise/comm.h"

namespace poise::test {

// Handles of rank r: all four, the pair {2i, 2i + 1}, and the ranks of equal place in the pairs.
struct Mesh {
  std::vector<std::shared_ptr<comm::Group>> shards[2] = {named({0, 1}), named({2, 3})};
  std::vector<std::shared_ptr<comm::Group>> replicas[2] = {named({0, 2}), named({1, 3})};
  comm::Ranks of(const std::shared_ptr<comm::Group>& all) const {
    const auto rank = static_cast<std::size_t>(all->rank());
    return {all, shards[rank / 2][rank % 2], replicas[rank % 2][rank / 2]};
  }

 private:
  static std::vector<std::shared_ptr<comm::Group>> named(std::vector<int> ranks) {
    return comm::threads(2, {.names = std::move(ranks)});
  }
};

}  // namespace poise::test
