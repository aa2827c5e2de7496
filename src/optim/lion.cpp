// Lion: one kernel over the whole span.
#include "optim/lion.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/lion.h"
#include "optim/span.h"

namespace poise::optim {

Lion::Lion(const config::OptimizerPolicy& policy, std::uint64_t seed)
    : beta1_(policy.beta1),
      beta2_(policy.beta2),
      bits_(policy.moments == "8bit" ? Bits::eight : Bits::fp32),
      seed_(seed) {
  check_betas(policy);
}

std::vector<Moment> Lion::moments() const {
  if (bits_ == Bits::fp32) return {{}};
  return {{at::kByte}, {at::kFloat, kernels::kQuantBlock}};
}

void Lion::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                 double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  const auto launch = launch_for(span.master.device());
  const kernels::LionSettings settings{beta1_, beta2_, factor};
  if (bits_ == Bits::eight) {
    kernels::Lion8BitArrays arrays;
    set_common_arrays(span, arrays);
    arrays.code = span.moments[0].data_ptr<std::uint8_t>();
    arrays.scale = span.moments[1].data_ptr<float>();
    const auto segments = rounded_segments(span, groups, seed_, update);
    return kernels::lion_8bit(launch, arrays, segments.data(),
                              static_cast<std::int64_t>(segments.size()), settings);
  }
  kernels::LionArrays arrays;
  set_common_arrays(span, arrays);
  arrays.momentum = span.moments[0].data_ptr<float>();
  const auto segments = kernel_segments<kernels::LionSegment>(span, groups);
  kernels::lion(launch, arrays, segments.data(), static_cast<std::int64_t>(segments.size()),
                settings);
}

}  // namespace poise::optim
