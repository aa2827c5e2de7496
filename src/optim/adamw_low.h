// AdamW and Adam with moments in bf16, rounded stochastically, or in 8 bits by blocks.
#pragma once

#include "kernels/adamw.h"
#include "poise/optim.h"

namespace poise::optim {

class AdamWLow : public Optimizer {
 public:
  enum class Bits { bf16, eight };
  // `seed`: what is rounded at random depends on it, the update, the parameter's name and the
  // element alone, so that shards and tiles change nothing.
  AdamWLow(const config::OptimizerPolicy& policy, bool decoupled, Bits bits, std::uint64_t seed);

  std::string name() const override;
  std::vector<Moment> moments() const override;
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  kernels::AdamSettings settings_;
  Bits bits_;
  std::uint64_t seed_;
};

}  // namespace poise::optim
