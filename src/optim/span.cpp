// The promises of Span, checked.
#include "optim/span.h"

#include "poise/error.h"

namespace poise::optim {
namespace {

void check_array(const at::Tensor& tensor, const at::Tensor& master, const char* what) {
  POISE_CHECK(tensor.defined() && tensor.is_contiguous(), what);
  POISE_CHECK(tensor.dim() == 1 && tensor.numel() == master.numel(), what);
  POISE_CHECK(tensor.device() == master.device(), what);
}

}  // namespace

void check_span(const Span& span, const std::vector<GroupSettings>& groups, int num_moments) {
  check_array(span.master, span.master, "master");
  POISE_CHECK(span.master.scalar_type() == at::kFloat, "master");
  check_array(span.gradient, span.master, "gradient");
  if (span.low.defined()) check_array(span.low, span.master, "low");
  POISE_CHECK(span.moments.size() == static_cast<std::size_t>(num_moments), span.moments.size());
  for (const at::Tensor& moment : span.moments) {
    check_array(moment, span.master, "moment");
    POISE_CHECK(moment.scalar_type() == at::kFloat, "moment");
  }
  std::int64_t previous_end = 0;
  for (const Segment& segment : span.segments) {
    POISE_CHECK(segment.begin >= previous_end && segment.end >= segment.begin, segment.begin);
    POISE_CHECK(segment.group >= 0 && static_cast<std::size_t>(segment.group) < groups.size(),
                segment.group);
    previous_end = segment.end;
  }
  POISE_CHECK(previous_end <= span.master.numel(), previous_end);
}

}  // namespace poise::optim
