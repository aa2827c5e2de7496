// Segments of parameters that began late, or are frozen.
#include <map>

#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {
namespace {

bool all_alike(const Span& span) {
  for (const Segment& segment : span.segments) {
    if (segment.frozen || segment.missed > 0) return false;
  }
  return true;
}

// Calls `part(updates missed)` with the span's segments cut down to those of each number.
template <class Part>
void for_each_number(Span& span, const Part& part) {
  std::map<std::int64_t, std::vector<Segment>> by_missed;
  for (const Segment& segment : span.segments) {
    if (!segment.frozen) by_missed[segment.missed].push_back(segment);
  }
  const auto all = std::move(span.segments);
  for (auto& [missed, segments] : by_missed) {
    span.segments = std::move(segments);
    part(missed);
  }
  span.segments = all;
}

}  // namespace

void apply_to_awake(const Optimizer& optimizer, Span& span,
                    const std::vector<GroupSettings>& groups, std::int64_t update, double factor) {
  if (all_alike(span)) return optimizer.apply(span, groups, update, factor);
  POISE_CHECK(!optimizer.keeps_whole_moments());
  for_each_number(
      span, [&](std::int64_t missed) { optimizer.apply(span, groups, update - missed, factor); });
  if (!span.low.defined()) return;
  for (const Segment& segment : span.segments) {  // low may be memory that is only written
    if (!segment.frozen) continue;
    const auto count = segment.end - segment.begin;
    span.low.narrow(0, segment.begin, count).copy_(span.master.narrow(0, segment.begin, count));
  }
}

at::Tensor sums_of_awake(const Optimizer& optimizer, int round, Span& span,
                         const std::vector<GroupSettings>& groups, std::int64_t update,
                         double factor) {
  if (all_alike(span)) return optimizer.sums(round, span, groups, update, factor);
  const auto all = std::move(span.segments);
  span.segments.clear();
  auto total = optimizer.sums(round, span, groups, update, factor);  // zeros
  span.segments = all;
  for_each_number(span, [&](std::int64_t missed) {
    total.add_(optimizer.sums(round, span, groups, update - missed, factor));
  });
  return total;
}

}  // namespace poise::optim
