// The optimizers by name. A new one: its header, its line here (docs/adding_an_optimizer.md).
#include <ATen/ops/empty.h>

#include "optim/adamw.h"
#include "optim/sgd.h"
#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {

Optimizer::~Optimizer() = default;

at::Tensor Optimizer::stats(const Span& span, const std::vector<GroupSettings>&, double) const {
  return at::empty({0}, span.master.options());
}

std::unique_ptr<Optimizer> make_optimizer(const config::OptimizerPolicy& policy) {
  if (policy.type == "adamw") return std::make_unique<AdamW>(policy, /*decoupled=*/true);
  if (policy.type == "adam") return std::make_unique<AdamW>(policy, /*decoupled=*/false);
  if (policy.type == "sgd") return std::make_unique<Sgd>(policy);
  fail("optim", "unknown optimizer: '", policy.type, "'; use one of: adamw, adam, sgd");
}

}  // namespace poise::optim
