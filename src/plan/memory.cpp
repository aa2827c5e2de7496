// The highest moment of an update: what is held, plus what forward and backward add link by link.
//
// [Note: moments] While link i runs forward, the links before it keep what they saved; while its
// backward runs, the links after it have let go. At stage 3 a link's parameters are whole, those
// that come next are on their way, and those of the rest are whole throughout. Where gradients are
// joined in every micro-batch, a link's whole fp32 gradients fill while those of the link after it
// travel, and the rest's wait for the end.
#include <algorithm>

#include "plan/states.h"
#include "poise/error.h"

namespace poise::plan {
namespace {

using ::poise::memory::Account;

class Moments {
 public:
  Moments(const Chain& chain, const Choice& choice, const Widths& widths)
      : chain_(chain), choice_(choice), widths_(widths), split_(split_of(choice)) {
    memory_.held = states(chain.flats, choice, widths);
    int block = 0;
    for (const auto& link : chain.links) {
      auto mode = Recompute::none;
      if (link.block) {
        const auto place = static_cast<std::size_t>(block++);
        if (place < choice.recomputed.size() && choice.recomputed[place]) mode = choice.recompute;
      }
      modes_.push_back(mode);
    }
  }

  Memory highest() {
    forward();
    backward();
    build();
    return std::move(memory_);
  }

 private:
  const Pass& pass(std::size_t i) const {
    return chain_.links[i].passes[static_cast<std::size_t>(modes_[i])];
  }
  // 16-bit copies of weights live in the graph of what is not recomputed.
  std::int64_t casts(std::size_t i) const {
    return modes_[i] == Recompute::none ? chain_.links[i].casts : 0;
  }
  std::int64_t flat_bytes(int flat, int width) const {
    if (flat < 0) return 0;
    return width * whole(chain_.flats[static_cast<std::size_t>(flat)].elements, choice_.ranks);
  }
  int flat_of(std::size_t i) const { return chain_.links[i].flat; }

  // Whole parameters while link i runs and `next` is gathered ahead of it.
  std::int64_t gathered(std::size_t i, std::size_t next) const {
    if (!split_.parameters) return 0;
    std::int64_t bytes = flat_bytes(chain_.rest, widths_.parameter);
    if (choice_.keep_gathered) {
      for (int flat = 0; flat < static_cast<int>(chain_.flats.size()); ++flat) {
        if (flat != chain_.rest) bytes += flat_bytes(flat, widths_.parameter);
      }
      return bytes;
    }
    bytes += flat_bytes(flat_of(i), widths_.parameter);
    if (next < chain_.links.size() && flat_of(next) != flat_of(i)) {
      bytes += flat_bytes(flat_of(next), widths_.parameter);
    }
    return bytes;
  }

  // Whole gradients of this micro-batch that fill or travel during the backward of link i.
  std::int64_t transient(std::size_t i) const {
    if (choice_.ranks == 1) return 0;
    const bool half = choice_.gradient_dtype != config::DType::fp32;
    const int after = i + 1 < chain_.links.size() ? flat_of(i + 1) : -1;
    std::int64_t bytes = half ? flat_bytes(after, 2) : 0;
    if (!choice_.reduces_every) return bytes;
    bytes += flat_bytes(chain_.rest, 4) + flat_bytes(flat_of(i), 4);
    if (choice_.overlap && after != flat_of(i)) bytes += flat_bytes(after, 4);
    return bytes;
  }

  void look(std::int64_t activations, std::int64_t whole_parameters, std::int64_t travelling,
            const char* what, const std::string& name) {
    const auto bytes = total(memory_.held) + activations + whole_parameters + travelling;
    if (bytes <= memory_.peak) return;
    memory_.peak = bytes;
    memory_.at_peak = memory_.held;
    memory_.at_peak[static_cast<std::size_t>(Account::activations)] += activations;
    memory_.at_peak[static_cast<std::size_t>(Account::gathered)] += whole_parameters;
    memory_.at_peak[static_cast<std::size_t>(Account::communication)] += travelling;
    memory_.moment = join(what, " of ", name);
  }

  void forward() {
    kept_ = 0;
    for (std::size_t i = 0; i < modes_.size(); ++i) {
      look(kept_ + casts(i) + pass(i).forward_peak, gathered(i, i + 1), 0, "forward",
           chain_.links[i].name);
      kept_ += pass(i).saved + casts(i);
    }
  }

  void backward() {
    std::int64_t waiting = 0;
    for (std::size_t i = modes_.size(); i-- > 0;) {
      kept_ -= pass(i).saved + casts(i);
      const auto again = modes_[i] == Recompute::none ? 0 : chain_.links[i].casts;
      look(kept_ + waiting + casts(i) + again + pass(i).backward_peak,
           gathered(i, i == 0 ? modes_.size() : i - 1), transient(i), "backward",
           chain_.links[i].name);
      waiting += chain_.links[i].held_gradient;
    }
  }

  // The user's model is whole on every rank until its flats are made, one after the other; over
  // several ranks each flat passes through a whole copy.
  void build() {
    std::int64_t theirs = 0;
    for (const auto& flat : chain_.flats) theirs += widths_.parameter * flat.elements;
    std::int64_t made = 0;
    for (const auto& flat : chain_.flats) {
      auto held = states({flat}, choice_, widths_);
      held[static_cast<std::size_t>(Account::communication)] = 0;
      made += total(held);
      const auto copy =
          choice_.ranks > 1 ? widths_.parameter * whole(flat.elements, choice_.ranks) : 0;
      memory_.build = std::max(memory_.build, theirs + made + copy);
      theirs -= widths_.parameter * flat.elements;
    }
  }

  const Chain& chain_;
  const Choice& choice_;
  const Widths& widths_;
  const Split split_;
  std::vector<Recompute> modes_;  // by link
  std::int64_t kept_ = 0;
  Memory memory_;
};

}  // namespace

Memory memory(const Chain& chain, const Choice& choice, const Widths& widths) {
  return Moments(chain, choice, widths).highest();
}

}  // namespace poise::plan
