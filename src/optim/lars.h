// LARS: momentum with a rate of its own for each parameter (You et al. 2017, arXiv:1708.03888).
#pragma once

#include "poise/optim.h"

namespace poise::optim {

class Lars : public Optimizer {
 public:
  explicit Lars(const config::OptimizerPolicy& policy);

  std::string name() const override { return "lars"; }
  std::vector<Moment> moments() const override { return {{}}; }
  int rounds() const override { return 1; }
  // Squares of each parameter's weights and gradient.
  at::Tensor sums(int round, const Span& span, const std::vector<GroupSettings>& groups,
                  std::int64_t update, double factor) const override;
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  double momentum_;
  double trust_coefficient_;
};

}  // namespace poise::optim
