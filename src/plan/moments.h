// The moments of an update, link by link.
//
// [Note: moments] While link i runs forward, the links before it keep what they saved; while its
// backward runs, the links after it have let go. At stage 3 a link's parameters are whole, those
// that come next are on their way, and those of the rest are whole throughout. What gradients hold
// on their way is that of joining.h; what is left of them is joined at the end of the backward.
#pragma once

#include "plan/joining.h"
#include "plan/states.h"

namespace poise::plan {

class Moments {
 public:
  Moments(const Chain& chain, const Choice& choice, const Widths& widths);

  std::size_t size() const { return modes_.size(); }
  bool is_block(std::size_t i) const { return chain_.links[i].block; }
  Recompute mode(std::size_t i) const { return modes_[i]; }
  // Of what is no block, after blocks some of which may be recomputed: inputs that those keep, what
  // follows does not let go.
  static Recompute mode_after(bool some_recomputed, Recompute mode) {
    return some_recomputed ? mode : Recompute::none;
  }

  // Bytes of a moment, by what they are; `kept`: by the links before i.
  struct Bytes {
    std::int64_t activations = 0, gathered = 0, communication = 0;
    std::int64_t all() const { return activations + gathered + communication; }
  };
  Bytes forward(std::size_t i, Recompute mode, std::int64_t kept) const;
  Bytes backward(std::size_t i, Recompute mode, std::int64_t kept) const;
  // What is left of gradients is joined: the model's own tensors are gone.
  Bytes end() const;
  std::int64_t saved(std::size_t i, Recompute mode) const;

  const Accounts& held() const { return held_; }
  // Highest while the engine is built.
  std::int64_t build() const;

 private:
  const Pass& pass(std::size_t i, Recompute mode) const {
    const auto& link = chain_.links[i];
    return (away_[i] ? link.away : link.passes)[static_cast<std::size_t>(mode)];
  }
  // 16-bit copies of weights live in the graph of what is not recomputed.
  std::int64_t casts(std::size_t i, Recompute mode) const {
    return mode == Recompute::none ? chain_.links[i].casts : 0;
  }
  std::int64_t whole_parameters(int flat) const {
    return flat < 0 ? 0 : whole_parameters_[static_cast<std::size_t>(flat)];
  }
  int flat_of(std::size_t i) const { return i < size() ? chain_.links[i].flat : -1; }
  std::int64_t gathered(std::size_t i, std::size_t next) const;

  const Chain& chain_;
  const Choice& choice_;
  const Widths& widths_;
  const Split split_;
  const Joining joining_;
  Accounts held_{};
  // By flat, and of all: asked for at every moment of every candidate.
  std::vector<std::int64_t> whole_parameters_;
  std::int64_t all_parameters_ = 0;
  std::vector<Recompute> modes_;       // by link
  std::vector<bool> away_;             // by link: what it saves is offloaded
  std::vector<std::int64_t> leaving_;  // when a link runs forward, and at the end: on its way out
  std::vector<std::int64_t> waiting_;  // by link: gradients of links after it that wait for the end
};

}  // namespace poise::plan
