// The optimizers by name. A new one: its header, its line here (docs/adding_an_optimizer.md).
#include <ATen/ops/empty.h>

#include <algorithm>

#include "optim/adafactor.h"
#include "optim/adamw.h"
#include "optim/adamw_low.h"
#include "optim/lamb.h"
#include "optim/lars.h"
#include "optim/lion.h"
#include "optim/sgd.h"
#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {

Optimizer::~Optimizer() = default;

bool Optimizer::keeps_whole_moments() const {
  const auto all = moments();
  return std::any_of(all.begin(), all.end(), [](const Moment& m) { return m.factored; });
}

at::Tensor Optimizer::sums(int, const Span& span, const std::vector<GroupSettings>&, std::int64_t,
                           double) const {
  return at::empty({0}, span.master.options().dtype(at::kDouble));
}

std::int64_t factored_numel(const Parameter& parameter) {
  std::int64_t numel = 1;
  for (const auto size : parameter.sizes) numel *= size;
  const auto dims = parameter.sizes.size();
  if (dims < 2 || numel == 0) return numel;
  return numel / parameter.sizes[dims - 1] + numel / parameter.sizes[dims - 2];
}

namespace {

std::unique_ptr<Optimizer> make_adamw(const config::OptimizerPolicy& policy, std::uint64_t seed) {
  const bool decoupled = policy.type == "adamw";
  if (policy.moments == "fp32") return std::make_unique<AdamW>(policy, decoupled);
  const auto bits = policy.moments == "bf16" ? AdamWLow::Bits::bf16 : AdamWLow::Bits::eight;
  return std::make_unique<AdamWLow>(policy, decoupled, bits, seed);
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const config::OptimizerPolicy& policy,
                                          std::uint64_t seed) {
  if (policy.type == "adamw" || policy.type == "adam") return make_adamw(policy, seed);
  if (policy.type == "adafactor") return std::make_unique<Adafactor>(policy);
  if (policy.type == "lamb") return std::make_unique<Lamb>(policy);
  if (policy.type == "lars") return std::make_unique<Lars>(policy);
  if (policy.type == "lion") return std::make_unique<Lion>(policy, seed);
  if (policy.type == "sgd") return std::make_unique<Sgd>(policy);
  fail("optim", "unknown optimizer: '", policy.type,
       "'; use one of: adamw, adam, adafactor, lamb, lars, lion, sgd");
}

}  // namespace poise::optim
