// A sequence of collectives whose result depends on every one of them.
#pragma once

#include <ATen/ops/full.h>

#include <cmath>

#include "comm/rank_values.h"
#include "poise/comm.h"

namespace poise::comm {

// A long chain in which each result feeds the next: an operation out of order changes the bits.
inline at::Tensor chain(Group& group, std::int64_t numel) {
  const int size = group.size();
  auto whole = flat_of(values_of(group.rank(), size * numel));
  auto mine = at::full({numel}, 0, at::kFloat);
  auto swapped = at::full({size * numel}, 0, at::kFloat);
  for (int step = 0; step < 20; ++step) {
    group.reduce_scatter(mine, whole, "down");
    group.all_gather(whole, mine, "up");
    group.all_to_all(swapped, whole, "across");
    group.all_reduce(swapped, "sum");
    group.broadcast(whole, step % size, "root").wait();
    for (std::int64_t i = 0; i < whole.numel(); ++i) {
      whole.mutable_data_ptr<float>()[i] =
          std::tanh(swapped.const_data_ptr<float>()[i] + 0.001f * static_cast<float>(i)) *
          static_cast<float>(1 + group.rank());
    }
  }
  group.barrier("end");
  return whole;
}

}  // namespace poise::comm
