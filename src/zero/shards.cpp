// The cuts, and which stage splits what.
#include "zero/shards.h"

#include <algorithm>

namespace poise::zero {

Range overlap(Range a, Range b) {
  const Range shared{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return shared.begin < shared.end ? shared : Range{b.begin, b.begin};
}

Shards::Shards(const ParamTable& table, const config::ZeroPolicy& policy, int rank, int size,
               bool offloaded)
    : table_(table),
      rank_(rank),
      size_(size),
      stage_(size > 1    ? static_cast<int>(policy.stage)
             : offloaded ? 3
                         : 0),
      every_(size > 1 && config::reduces_every_micro_batch(policy)) {}

std::int64_t Shards::shard(int flat) const {
  constexpr auto a = ParamTable::kAlignment;
  const auto numel = table_.flats()[static_cast<std::size_t>(flat)].numel;
  const auto rows = numel / a;  // a flat is a multiple of the alignment
  return (rows + size_ - 1) / size_ * a;
}

}  // namespace poise::zero
