// Stop 10's first half, for optimizers that need sums over whole parameters before they may update
// any element: each round's parts, joined over the ranks that share the parameters.
#pragma once

#include <vector>

#include "engine/state_update.h"
#include "poise/comm.h"
#include "zero/shards.h"

namespace poise::engine {

// Fills every state's `sums`, round by round; all ranks. Parts are those of the shards, joined in
// rank order, also where every rank has the whole: all stages get the same bits.
void sum_over_parameters(std::vector<OptimizerState>& states, const optim::Optimizer& optimizer,
                         const std::vector<optim::GroupSettings>& groups, std::int64_t update,
                         double factor, const zero::Shards& shards, comm::Group& group);

}  // namespace poise::engine
