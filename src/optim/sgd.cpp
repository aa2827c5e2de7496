// SGD: one kernel over the whole span.
#include "optim/sgd.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/sgd.h"
#include "optim/span.h"
#include "poise/error.h"

namespace poise::optim {

Sgd::Sgd(const config::OptimizerPolicy& policy)
    : momentum_(policy.momentum), nesterov_(policy.nesterov) {
  if (!(momentum_ >= 0)) fail("optim", "momentum is negative: ", momentum_, "; use 0 or more");
  if (nesterov_ && momentum_ == 0) {
    fail("optim", "nesterov without momentum; set momentum, for example 0.9, or nesterov to false");
  }
}

void Sgd::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t,
                double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  kernels::SgdArrays arrays;
  set_common_arrays(span, arrays);
  if (num_moments() == 1) arrays.momentum = span.moments[0].data_ptr<float>();
  const kernels::SgdSettings settings{momentum_, nesterov_, factor};
  const auto segments = kernel_segments<kernels::SgdSegment>(span, groups);
  kernels::sgd(launch_for(span.master.device()), arrays, segments.data(),
               static_cast<std::int64_t>(segments.size()), settings);
}

}  // namespace poise::optim
