// Stochastic gradient descent with momentum, as torch.optim.SGD without dampening.
#pragma once

#include "poise/optim.h"

namespace poise::optim {

class Sgd : public Optimizer {
 public:
  explicit Sgd(const config::OptimizerPolicy& policy);

  std::string name() const override { return "sgd"; }
  std::vector<Moment> moments() const override {
    return std::vector<Moment>(momentum_ != 0 ? 1 : 0);
  }
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  double momentum_;
  bool nesterov_;
};

}  // namespace poise::optim
