// Lion: the sign of a blend of momentum and gradient (Chen et al. 2023, arXiv:2302.06675).
#pragma once

#include "poise/optim.h"

namespace poise::optim {

class Lion : public Optimizer {
 public:
  explicit Lion(const config::OptimizerPolicy& policy);

  std::string name() const override { return "lion"; }
  std::vector<Moment> moments() const override { return {{}}; }
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  double beta1_;
  double beta2_;
};

}  // namespace poise::optim
