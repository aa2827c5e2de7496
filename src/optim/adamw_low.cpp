// AdamW with moments in fewer bits: one kernel over the whole span.
#include "optim/adamw_low.h"

#include <c10/core/DeviceGuard.h>

#include "kernels/adamw_low.h"
#include "optim/span.h"
#include "poise/error.h"

namespace poise::optim {
namespace {

// Steele, Lea and Flood 2014, SplitMix64: neighbouring numbers become unrelated ones.
std::uint64_t scattered(std::uint64_t number) {
  number += 0x9E3779B97F4A7C15u;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9u;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBu;
  return number ^ (number >> 31);
}

std::vector<kernels::AdamLowSegment> random_segments(const Span& span,
                                                     const std::vector<GroupSettings>& groups,
                                                     std::uint64_t key) {
  std::vector<kernels::AdamLowSegment> segments;
  segments.reserve(span.segments.size());
  for (const Segment& s : span.segments) {
    const GroupSettings& group = groups[s.group];
    segments.push_back({s.begin, s.end, group.lr, group.weight_decay, s.first,
                        scattered(key ^ scattered(s.parameter))});
  }
  return segments;
}

}  // namespace

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
  const auto segments = random_segments(
      span, groups, scattered(seed_ ^ scattered(static_cast<std::uint64_t>(update))));
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
