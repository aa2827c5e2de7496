// LAMB: norms first, then one kernel over the whole span.
#include "optim/lamb.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "kernels/lamb.h"
#include "optim/span.h"
#include "optim/trust.h"
#include "poise/error.h"

namespace poise::optim {
namespace {

kernels::AdamArrays arrays_of(const Span& span) {
  kernels::AdamArrays arrays;
  set_common_arrays(span, arrays);
  arrays.moment1 = span.moments[0].data_ptr<float>();
  arrays.moment2 = span.moments[1].data_ptr<float>();
  return arrays;
}

std::int64_t size(const std::vector<kernels::LambSegment>& segments) {
  return static_cast<std::int64_t>(segments.size());
}

}  // namespace

Lamb::Lamb(const config::OptimizerPolicy& policy)
    : beta1_(policy.beta1),
      beta2_(policy.beta2),
      eps_(policy.eps),
      min_trust_(policy.min_trust),
      max_trust_(policy.max_trust) {
  check_betas(policy);
  if (!(eps_ >= 0)) fail("optim", "eps is negative: ", eps_, "; use 0 or more");
}

kernels::AdamSettings Lamb::settings(std::int64_t update, double factor) const {
  kernels::AdamSettings made;
  made.beta1 = beta1_;
  made.beta2 = beta2_;
  made.eps = eps_;
  made.step = update;
  made.factor = factor;
  return made;
}

at::Tensor Lamb::sums(int, const Span& span, const std::vector<GroupSettings>& groups,
                      std::int64_t update, double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  return squares_of(span, {[&](double* out) { weight_squares(span, out); },
                           [&](double* out) {
                             const auto segments =
                                 kernel_segments<kernels::LambSegment>(span, groups);
                             kernels::lamb_squares(launch_for(span.master.device()),
                                                   arrays_of(span), segments.data(), size(segments),
                                                   settings(update, factor), out);
                           }});
}

// The paper's ratio; where one of the norms is zero the step is Adam's.
double Lamb::trust(double weights, double direction) const {
  if (!(weights > 0 && direction > 0)) return 1;
  double ratio = weights / direction;
  if (max_trust_ > 0) ratio = std::min(ratio, max_trust_);
  return std::max(ratio, min_trust_);
}

void Lamb::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                 double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  const auto weights = norms_of(span.sums.at(0), 0, 2);
  const auto directions = norms_of(span.sums.at(0), 1, 2);
  auto segments = kernel_segments<kernels::LambSegment>(span, groups);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto parameter = static_cast<std::size_t>(span.segments[s].index);
    segments[s].trust = trust(weights.at(parameter), directions.at(parameter));
  }
  kernels::lamb(launch_for(span.master.device()), arrays_of(span), segments.data(), size(segments),
                settings(update, factor));
}

}  // namespace poise::optim
