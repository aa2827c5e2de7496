// AdamW, and Adam (weight decay added to the gradient), as torch.optim's.
#pragma once

#include "poise/optim.h"

namespace poise::optim {

class AdamW : public Optimizer {
 public:
  AdamW(const config::OptimizerPolicy& policy, bool decoupled);

  std::string name() const override { return decoupled_ ? "adamw" : "adam"; }
  std::vector<Moment> moments() const override { return {{}, {}}; }
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  double beta1_;
  double beta2_;
  double eps_;
  bool decoupled_;
};

}  // namespace poise::optim
