// Parts by shards.
#include "engine/whole_sums.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "poise/error.h"

namespace poise::engine {
namespace {

// States of such optimizers are on the device; the tensors are shared, nothing is copied.
optim::Span span_of(const OptimizerState& state) {
  optim::Span span;
  span.master = state.master->tensor();
  span.gradient = state.gradient->tensor();
  if (state.low) span.low = state.low->tensor();
  for (const auto& moment : state.moments) span.moments.push_back(moment->tensor());
  POISE_CHECK(span.master.defined() && span.gradient.defined());
  span.segments = state.segments;
  span.parameters = state.parameters;
  span.sums = state.sums;
  return span;
}

std::vector<optim::Segment> inside(const std::vector<optim::Segment>& segments, zero::Range range) {
  std::vector<optim::Segment> cut;
  for (auto segment : segments) {
    const auto part = zero::overlap({segment.begin, segment.end}, range);
    if (part.size() == 0) continue;
    segment.first += part.begin - segment.begin;
    segment.begin = part.begin;
    segment.end = part.end;
    cut.push_back(segment);
  }
  return cut;
}

}  // namespace

void sum_over_parameters(std::vector<OptimizerState>& states, const optim::Optimizer& optimizer,
                         const std::vector<optim::GroupSettings>& groups, std::int64_t update,
                         double factor, const zero::Shards& shards, comm::Group& group) {
  for (auto& state : states) state.sums.clear();
  const bool split = shards.size() > 1 && shards.splits_optimizer();
  for (int round = 0; round < optimizer.rounds(); ++round) {
    std::vector<at::Tensor> parts;
    for (const auto& state : states) {
      auto span = span_of(state);
      if (split || shards.size() == 1) {
        parts.push_back(optim::sums_of_awake(optimizer, round, span, groups, update, factor));
        continue;
      }
      at::Tensor total;
      const auto each = shards.shard(state.flat);
      for (int rank = 0; rank < shards.size(); ++rank) {
        span.segments = inside(state.segments, {each * rank, each * (rank + 1)});
        const auto part = optim::sums_of_awake(optimizer, round, span, groups, update, factor);
        total = total.defined() ? total.add_(part) : part;
      }
      parts.push_back(total);
    }
    auto joined = at::cat(parts);
    if (split && joined.numel() > 0) {
      group.all_reduce(joined, "sums over whole parameters").wait();
    }
    joined = joined.cpu();
    if (split) group.check();  // on a GPU the collectives of a failed group end without a result
    std::int64_t begin = 0;
    for (std::size_t s = 0; s < states.size(); ++s) {
      states[s].sums.push_back(joined.narrow(0, begin, parts[s].numel()));
      begin += parts[s].numel();
    }
  }
}

}  // namespace poise::engine
