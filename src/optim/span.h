// What every optimizer needs of a Span before a kernel sees raw pointers.
#pragma once

#include <vector>

#include "core/launch.h"
#include "kernels/rounded.h"
#include "poise/optim.h"

namespace poise::optim {

// Throws Error where a beta is none.
void check_betas(const config::OptimizerPolicy& policy);

// Dtypes, lengths and groups as Span promises; a broken promise is our bug.
void check_span(const Span& span, const std::vector<GroupSettings>& groups,
                const std::vector<Moment>& moments);

// The segments with their groups' settings, as kernels take them.
template <class KernelSegment>
std::vector<KernelSegment> kernel_segments(const Span& span,
                                           const std::vector<GroupSettings>& groups) {
  std::vector<KernelSegment> segments;
  segments.reserve(span.segments.size());
  for (const Segment& segment : span.segments) {
    const GroupSettings& group = groups[segment.group];
    segments.push_back({segment.begin, segment.end, group.lr, group.weight_decay});
  }
  return segments;
}

// The same where moments are rounded at random: by bits that depend on seed, update and the
// parameter's name.
std::vector<kernels::RoundedSegment> rounded_segments(const Span& span,
                                                      const std::vector<GroupSettings>& groups,
                                                      std::uint64_t seed, std::int64_t update);

// Fills the members that all kernels' array structs share.
template <class Arrays>
void set_common_arrays(const Span& span, Arrays& arrays) {
  arrays.master = span.master.data_ptr<float>();
  arrays.gradient = span.gradient.const_data_ptr();
  arrays.gradient_dtype = kernel_dtype(span.gradient.scalar_type());
  if (span.low.defined()) {
    arrays.low = span.low.data_ptr();
    arrays.low_dtype = kernel_dtype(span.low.scalar_type());
  }
}

}  // namespace poise::optim
