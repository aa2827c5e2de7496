// LAMB: Adam with a trust ratio for each parameter (You et al. 2019, arXiv:1904.00962).
#pragma once

#include "kernels/adamw.h"
#include "poise/optim.h"

namespace poise::optim {

class Lamb : public Optimizer {
 public:
  explicit Lamb(const config::OptimizerPolicy& policy);

  std::string name() const override { return "lamb"; }
  std::vector<Moment> moments() const override { return {{}, {}}; }
  int rounds() const override { return 1; }
  // Squares of each parameter's weights and of the direction it would take.
  at::Tensor sums(int round, const Span& span, const std::vector<GroupSettings>& groups,
                  std::int64_t update, double factor) const override;
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  kernels::AdamSettings settings(std::int64_t update, double factor) const;
  double trust(double weights, double direction) const;

  double beta1_, beta2_, eps_;
  double min_trust_, max_trust_;  // 0: no limit
};

}  // namespace poise::optim
