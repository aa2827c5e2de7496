// AdamW with moments in fewer bits: one kernel over the whole span.
#include "optim/adamw_low.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/adamw_low.h"
#include "optim/span.h"
#include "poise/error.h"

namespace poise::optim {

AdamWLow::AdamWLow(const config::OptimizerPolicy& policy, bool decoupled, Bits bits,
                   std::uint64_t seed)
    : bits_(bits), seed_(seed) {
  check_betas(policy);
  if (!(policy.eps >= 0)) fail("optim", "eps is negative: ", policy.eps, "; use 0 or more");
  settings_.beta1 = policy.beta1;
  settings_.beta2 = policy.beta2;
  settings_.eps = policy.eps;
  settings_.decoupled = decoupled;
}

std::string AdamWLow::name() const {
  return join(settings_.decoupled ? "adamw" : "adam", bits_ == Bits::bf16 ? "_bf16" : "_8bit");
}

std::vector<Moment> AdamWLow::moments() const {
  if (bits_ == Bits::bf16) return {{at::kBFloat16}, {at::kBFloat16}};
  const Moment codes{at::kByte}, scales{at::kFloat, kernels::kQuantBlock};
  return {codes, scales, codes, scales};
}

void AdamWLow::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                     double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  auto settings = settings_;
  settings.step = update;
  settings.factor = factor;
  const auto segments = rounded_segments(span, groups, seed_, update);
  const auto count = static_cast<std::int64_t>(segments.size());
  const auto launch = launch_for(span.master.device());
  auto& m = span.moments;
  if (bits_ == Bits::bf16) {
    kernels::AdamBf16Arrays arrays;
    set_common_arrays(span, arrays);
    arrays.moment1 = static_cast<kernels::Bf16*>(m[0].data_ptr());
    arrays.moment2 = static_cast<kernels::Bf16*>(m[1].data_ptr());
    return kernels::adamw_bf16(launch, arrays, segments.data(), count, settings);
  }
  kernels::Adam8BitArrays arrays;
  set_common_arrays(span, arrays);
  arrays.code1 = m[0].data_ptr<std::uint8_t>();
  arrays.scale1 = m[1].data_ptr<float>();
  arrays.code2 = m[2].data_ptr<std::uint8_t>();
  arrays.scale2 = m[3].data_ptr<float>();
  kernels::adamw_8bit(launch, arrays, segments.data(), count, settings);
}

}  // namespace poise::optim
