// Lion: one kernel over the whole span.
#include "optim/lion.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/lion.h"
#include "optim/span.h"

namespace poise::optim {

Lion::Lion(const config::OptimizerPolicy& policy) : beta1_(policy.beta1), beta2_(policy.beta2) {
  check_betas(policy);
}

void Lion::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t,
                 double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  kernels::LionArrays arrays;
  set_common_arrays(span, arrays);
  arrays.momentum = span.moments[0].data_ptr<float>();
  const kernels::LionSettings settings{beta1_, beta2_, factor};
  const auto segments = kernel_segments<kernels::LionSegment>(span, groups);
  kernels::lion(launch_for(span.master.device()), arrays, segments.data(),
                static_cast<std::int64_t>(segments.size()), settings);
}

}  // namespace poise::optim
