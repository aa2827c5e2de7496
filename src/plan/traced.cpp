// A traced model's chain at any micro-batch: lines through its neighbours.
#include <cmath>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

class Line {
 public:
  explicit Line(double share) : share_(share) {}
  double operator()(double low, double high) const { return low + (high - low) * share_; }
  std::int64_t operator()(std::int64_t low, std::int64_t high) const {
    const double bytes = (*this)(static_cast<double>(low), static_cast<double>(high));
    return static_cast<std::int64_t>(std::ceil(bytes > 0 ? bytes : 0));
  }

 private:
  double share_;
};

Pass between(const Line& line, const Pass& low, const Pass& high) {
  return {.saved = line(low.saved, high.saved),
          .forward_peak = line(low.forward_peak, high.forward_peak),
          .backward_peak = line(low.backward_peak, high.backward_peak),
          .again_flops = line(low.again_flops, high.again_flops),
          .sent = line(low.sent, high.sent),
          .leaving = line(low.leaving, high.leaving)};
}

}  // namespace

Chain chain(const Traced& traced, std::int64_t micro_batch) {
  const auto& sizes = traced.micro_batches;
  POISE_CHECK(!sizes.empty() && sizes.size() == traced.chains.size(), sizes.size());
  if (sizes.size() == 1) return traced.chains.front();
  std::size_t above = 1;
  while (above + 1 < sizes.size() && sizes[above] < micro_batch) ++above;
  const auto &low = traced.chains[above - 1], &other = traced.chains[above];
  if (low.links.size() != other.links.size()) {
    fail("plan", "the model ran ", low.links.size(), " blocks in one micro-batch and ",
         other.links.size(), " in another; its chain cannot be planned");
  }
  const Line line(static_cast<double>(micro_batch - sizes[above - 1]) /
                  static_cast<double>(sizes[above] - sizes[above - 1]));
  Chain made = low;
  for (std::size_t i = 0; i < made.links.size(); ++i) {
    auto& link = made.links[i];
    const auto& high = other.links[i];
    for (std::size_t mode = 0; mode < link.passes.size(); ++mode) {
      link.passes[mode] = between(line, link.passes[mode], high.passes[mode]);
      link.away[mode] = between(line, link.away[mode], high.away[mode]);
    }
    link.flops = line(link.flops, high.flops);
    link.moved = line(link.moved, high.moved);
  }
  return made;
}

}  // namespace poise::plan
