// What gradients hold on their way to their sums over ranks, while a backward goes on.
#pragma once

#include "poise/plan.h"

namespace poise::plan {

struct Joining {
  std::vector<std::int64_t> backward;  // by link: the most from the end of the one after it on
  std::int64_t end = 0;                // once all links are through: what was left is joined
};

// Bytes of the last micro-batch of a window, where the ranks join their gradients.
Joining joining(const Chain& chain, const Choice& choice);

}  // namespace poise::plan
