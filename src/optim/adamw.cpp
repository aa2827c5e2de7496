// AdamW and Adam: one kernel over the whole span.
#include "optim/adamw.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/adamw.h"
#include "optim/span.h"
#include "poise/error.h"

namespace poise::optim {

AdamW::AdamW(const config::OptimizerPolicy& policy, bool decoupled)
    : beta1_(policy.beta1), beta2_(policy.beta2), eps_(policy.eps), decoupled_(decoupled) {
  check_betas(policy);
  if (!(eps_ >= 0)) fail("optim", "eps is negative: ", eps_, "; use 0 or more");
}

void AdamW::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                  double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  kernels::AdamArrays arrays;
  set_common_arrays(span, arrays);
  arrays.moment1 = span.moments[0].data_ptr<float>();
  arrays.moment2 = span.moments[1].data_ptr<float>();
  kernels::AdamSettings settings;
  settings.beta1 = beta1_;
  settings.beta2 = beta2_;
  settings.eps = eps_;
  settings.step = update;
  settings.decoupled = decoupled_;
  settings.factor = factor;
  const auto segments = kernel_segments<kernels::AdamSegment>(span, groups);
  kernels::adamw(launch_for(span.master.device()), arrays, segments.data(),
                 static_cast<std::int64_t>(segments.size()), settings);
}

}  // namespace poise::optim
