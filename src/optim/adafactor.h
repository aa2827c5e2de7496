// Adafactor: second moments kept by rows and columns (Shazeer and Stern 2018, arXiv:1804.04235),
// with the arithmetic of transformers' class of that name, without momentum.
#pragma once

#include "kernels/adafactor.h"
#include "poise/optim.h"

namespace poise::optim {

class Adafactor : public Optimizer {
 public:
  explicit Adafactor(const config::OptimizerPolicy& policy);

  std::string name() const override { return "adafactor"; }
  std::vector<Moment> moments() const override;
  int rounds() const override { return 2; }
  // Round 0: square sums of rows and columns; round 1: of each parameter's step and weights.
  at::Tensor sums(int round, const Span& span, const std::vector<GroupSettings>& groups,
                  std::int64_t update, double factor) const override;
  void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
             double factor) const override;

 private:
  struct Factors {
    at::Tensor moments;  // after this update, fp32, CPU
    at::Tensor factors;  // what rows and columns multiply the gradient by; on the span's device
  };
  // Of all parameters, or of those alone that have a piece in the span.
  enum class Of { all, pieces };
  Factors factors(const Span& span, std::int64_t update, Of of) const;

  double clip_threshold_, decay_rate_;
  double eps_square_;  // added to squares of gradients
  double eps_scale_;   // smallest root mean square of a parameter that scales the rate
  bool scale_parameter_;
};

}  // namespace poise::optim
