// The promises of Span, checked.
#include "optim/span.h"

#include "poise/error.h"

namespace poise::optim {
namespace {

void check_array(const at::Tensor& tensor, const at::Tensor& master, const char* what,
                 std::int64_t block = 1) {
  POISE_CHECK(tensor.defined() && tensor.is_contiguous(), what);
  POISE_CHECK(tensor.dim() == 1 && tensor.numel() * block == master.numel(), what);
  POISE_CHECK(tensor.device() == master.device(), what);
}

}  // namespace

void check_betas(const config::OptimizerPolicy& policy) {
  for (const double beta : {policy.beta1, policy.beta2}) {
    if (!(beta >= 0 && beta < 1)) fail("optim", "beta out of range: ", beta, "; use [0, 1)");
  }
}

void check_span(const Span& span, const std::vector<GroupSettings>& groups,
                const std::vector<Moment>& moments) {
  check_array(span.master, span.master, "master");
  POISE_CHECK(span.master.scalar_type() == at::kFloat, "master");
  check_array(span.gradient, span.master, "gradient");
  if (span.low.defined()) check_array(span.low, span.master, "low");
  POISE_CHECK(span.moments.size() == moments.size(), span.moments.size());
  for (std::size_t m = 0; m < moments.size(); ++m) {
    if (moments[m].factored) continue;
    check_array(span.moments[m], span.master, "moment", moments[m].block);
    POISE_CHECK(span.moments[m].scalar_type() == moments[m].dtype, "moment");
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

namespace {

// Steele, Lea and Flood 2014, SplitMix64: neighbouring numbers become unrelated ones.
std::uint64_t scattered(std::uint64_t number) {
  number += 0x9E3779B97F4A7C15u;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9u;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBu;
  return number ^ (number >> 31);
}

}  // namespace

std::vector<kernels::RoundedSegment> rounded_segments(const Span& span,
                                                      const std::vector<GroupSettings>& groups,
                                                      std::uint64_t seed, std::int64_t update) {
  const auto key = scattered(seed ^ scattered(static_cast<std::uint64_t>(update)));
  std::vector<kernels::RoundedSegment> segments;
  segments.reserve(span.segments.size());
  for (const Segment& s : span.segments) {
    const GroupSettings& group = groups[s.group];
    segments.push_back({s.begin, s.end, group.lr, group.weight_decay, s.first,
                        scattered(key ^ scattered(s.parameter))});
  }
  return segments;
}

}  // namespace poise::optim
