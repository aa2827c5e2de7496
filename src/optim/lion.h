// Lion: the sign of a blend of momentum and gradient (Chen et al. 2023, arXiv:2302.06675).
#pragma once

#include "poise/optim.h"

namespace poise::optim {

class Lion : public Optimizer {
 public:
  enum class Bits { fp32, eight };  // of the momentum
  // `seed`: what is rounded at random depends on it, the update, the parameter's name and the
  // element alone, so that shards and tiles change nothing.
  Lion(const config::OptimizerPolicy& policy, std::uint64_t seed);

  std::string name() const override { return bits_ == Bits::fp32 ? "lion" : "lion_8bit"; }
  std::vector<Moment> moments() const override;
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  double beta1_;
  double beta2_;
  Bits bits_;
  std::uint64_t seed_;
};

}  // namespace poise::optim
