// Which blocks to recompute where blocks differ.
//
// What a choice of blocks holds at a block depends on the blocks before it through one number, what
// they keep. So of all choices for the first i blocks only those matter that no other one beats in
// both bytes kept and FLOPs repeated: they are carried from block to block. Equal blocks leave i +
// 1 of them; where uneven ones leave more than kMost, kept bytes are rounded up to steps of the
// budget, which can cost the last step's worth of it but never more than the budget.
#include <algorithm>
#include <limits>

#include "plan/moments.h"

namespace poise::plan {
namespace {

constexpr std::size_t kMost = 5000;
constexpr std::int64_t kSteps = 10000;

struct State {
  std::int64_t kept = 0;
  double again = 0;
  int before = -1;  // of the last link's states
  bool recomputed = false;
  bool any = false;  // of the blocks so far
};

// Drops what another state beats; rounds where there are too many.
void prune(std::vector<State>& states, std::int64_t budget) {
  const auto by_bytes = [](const State& a, const State& b) {
    return a.kept != b.kept ? a.kept < b.kept : a.again < b.again;
  };
  const auto drop = [&] {
    std::sort(states.begin(), states.end(), by_bytes);
    std::size_t best = 0;
    for (std::size_t i = 1; i < states.size(); ++i) {
      if (states[i].again < states[best].again) states[++best] = states[i];
    }
    if (!states.empty()) states.resize(best + 1);
  };
  drop();
  if (states.size() <= kMost) return;
  const auto step = std::max<std::int64_t>(1, budget / kSteps);
  for (auto& state : states) state.kept = (state.kept + step - 1) / step * step;
  drop();
}

class Programme {
 public:
  Programme(const Chain& chain, const Moments& moments, std::int64_t budget)
      : chain_(chain), moments_(moments), room_(budget - total(moments.held())) {}

  std::optional<std::vector<bool>> run() {
    if (moments_.end().all() > room_) return std::nullopt;
    std::vector<State> states{State{}};
    for (std::size_t i = 0; i < moments_.size() && !states.empty(); ++i) {
      std::vector<State> next;
      for (int s = 0; s < static_cast<int>(states.size()); ++s) {
        const auto& state = states[static_cast<std::size_t>(s)];
        if (moments_.is_block(i)) {
          step(state, s, i, Recompute::none, next);
          step(state, s, i, Recompute::whole, next);
        } else {
          step(state, s, i, Moments::mode_after(state.any, Recompute::whole), next);
        }
      }
      prune(next, room_);
      history_.push_back(next);
      states = std::move(next);
    }
    if (states.empty()) return std::nullopt;
    return path(states);
  }

 private:
  void step(const State& state, int index, std::size_t i, Recompute mode,
            std::vector<State>& next) const {
    if (moments_.forward(i, mode, state.kept).all() > room_) return;
    if (moments_.backward(i, mode, state.kept).all() > room_) return;
    const bool repeats = moments_.is_block(i) && mode != Recompute::none;
    const double flops = chain_.links[i].passes[static_cast<std::size_t>(mode)].again_flops;
    next.push_back({state.kept + moments_.saved(i, mode), state.again + (repeats ? flops : 0),
                    index, repeats, state.any || repeats});
  }

  // Back from the state that repeats least.
  std::vector<bool> path(const std::vector<State>& last) const {
    auto best = std::min_element(last.begin(), last.end(),
                                 [](const State& a, const State& b) { return a.again < b.again; });
    auto index = static_cast<int>(best - last.begin());
    std::vector<bool> blocks;
    for (std::size_t i = history_.size(); i-- > 0;) {
      const auto& state = history_[i][static_cast<std::size_t>(index)];
      if (moments_.is_block(i)) blocks.push_back(state.recomputed);
      index = state.before;
    }
    std::reverse(blocks.begin(), blocks.end());
    return blocks;
  }

  const Chain& chain_;
  const Moments& moments_;
  const std::int64_t room_;
  std::vector<std::vector<State>> history_;  // by link
};

}  // namespace

std::optional<std::vector<bool>> cheapest_recompute(const Chain& chain, const Choice& choice,
                                                    const Widths& widths, std::int64_t budget) {
  const Moments moments(chain, choice, widths);
  if (moments.build() > budget) return std::nullopt;
  return Programme(chain, moments, budget).run();
}

std::int64_t least_budget(const Chain& chain, const Choice& choice, const Widths& widths) {
  const Moments moments(chain, choice, widths);
  auto free = choice;
  free.recomputed.clear();
  std::int64_t high = memory(chain, free, widths).highest();
  std::int64_t low = total(moments.held());
  while (low < high) {
    const auto middle = low + (high - low) / 2;
    if (cheapest_recompute(chain, choice, widths, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

}  // namespace poise::plan
