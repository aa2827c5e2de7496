// LARS: norms first, then one kernel over the whole span.
#include "optim/lars.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/lars.h"
#include "optim/span.h"
#include "optim/trust.h"
#include "poise/error.h"

namespace poise::optim {

Lars::Lars(const config::OptimizerPolicy& policy)
    : momentum_(policy.momentum), trust_coefficient_(policy.trust_coefficient) {
  if (!(momentum_ >= 0)) fail("optim", "momentum is negative: ", momentum_, "; use 0 or more");
  if (!(trust_coefficient_ > 0)) {
    fail("optim", "trust_coefficient is ", trust_coefficient_, "; use more than 0, such as 0.001");
  }
}

at::Tensor Lars::sums(int, const Span& span, const std::vector<GroupSettings>& groups, std::int64_t,
                      double) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  return squares_of(span, {[&](double* out) { weight_squares(span, out); },
                           [&](double* out) { gradient_squares(span, out); }});
}

void Lars::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t,
                 double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  const auto weights = norms_of(span.sums.at(0), 0, 2);
  const auto gradients = norms_of(span.sums.at(0), 1, 2);
  auto segments = kernel_segments<kernels::LarsSegment>(span, groups);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto parameter = static_cast<std::size_t>(span.segments[s].index);
    // Biases and norms, whose weights say nothing about a good length, take the rate as it is, and
    // so does what is zero.
    if (span.parameters.at(parameter).sizes.size() < 2) continue;
    const double weight = weights.at(parameter);
    const double length = gradients.at(parameter) * factor + segments[s].weight_decay * weight;
    if (weight > 0 && length > 0) segments[s].lr *= trust_coefficient_ * weight / length;
  }
  kernels::LarsArrays arrays;
  set_common_arrays(span, arrays);
  arrays.momentum = span.moments[0].data_ptr<float>();
  kernels::lars(launch_for(span.master.device()), arrays, segments.data(),
                static_cast<std::int64_t>(segments.size()), {momentum_, factor});
}

}  // namespace poise::optim
