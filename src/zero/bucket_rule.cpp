// Neighbours of one type, as many as the limit takes.
#include "zero/bucket_rule.h"

#include <utility>

namespace poise::zero {

std::vector<std::vector<int>> shared_collectives(const std::vector<Load>& loads) {
  std::vector<std::vector<int>> shared;
  std::vector<int> open;
  std::int64_t bytes = 0;
  const auto close = [&] {
    auto closed = std::exchange(open, {});
    if (closed.size() > 1) shared.push_back(std::move(closed));
    bytes = 0;
  };
  for (int place = 0; place < static_cast<int>(loads.size()); ++place) {
    const auto& load = loads[static_cast<std::size_t>(place)];
    const auto more = load.numel * std::int64_t{sizeof(float)};
    if (more == 0) continue;
    const bool joins =
        open.empty() || loads[static_cast<std::size_t>(open.front())].type == load.type;
    if (!joins || bytes + more > kBucketBytes) close();
    open.push_back(place);
    bytes += more;
  }
  close();
  return shared;
}

}  // namespace poise::zero
