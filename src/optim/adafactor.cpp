// Adafactor: the small arrays of rows and columns on the host, in fp64 and in one order; kernels
// over the elements.
#include "optim/adafactor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>

#include "optim/span.h"
#include "optim/trust.h"
#include "poise/error.h"

namespace poise::optim {
namespace {

std::int64_t numel_of(const Parameter& parameter) {
  std::int64_t numel = 1;
  for (const auto size : parameter.sizes) numel *= size;
  return numel;
}

// Where each parameter's factors begin, and behind the last one where all end.
std::vector<std::int64_t> begins_of(const Span& span) {
  std::vector<std::int64_t> begins{0};
  for (const auto& parameter : span.parameters) {
    begins.push_back(begins.back() + factored_numel(parameter));
  }
  return begins;
}

std::vector<kernels::FactoredSegment> segments_of(const Span& span) {
  const auto begins = begins_of(span);
  std::vector<kernels::FactoredSegment> segments;
  for (const Segment& s : span.segments) {
    const auto index = static_cast<std::size_t>(s.index);
    const auto& parameter = span.parameters.at(index);
    kernels::FactoredSegment segment;
    segment.begin = s.begin;
    segment.end = s.end;
    segment.first = s.first;
    segment.layout =
        kernels::factor_layout(parameter.sizes.data(), parameter.strides.data(),
                               static_cast<int>(parameter.sizes.size()), begins[index]);
    segments.push_back(segment);
  }
  return segments;
}

kernels::FactoredArrays arrays_of(const Span& span, const at::Tensor& factors = {}) {
  kernels::FactoredArrays arrays;
  set_common_arrays(span, arrays);
  if (factors.defined()) arrays.factors = factors.const_data_ptr<float>();
  return arrays;
}

}  // namespace

Adafactor::Adafactor(const config::OptimizerPolicy& policy)
    : clip_threshold_(policy.clip_threshold),
      decay_rate_(policy.decay_rate),
      eps_square_(policy.eps_square),
      eps_scale_(policy.eps_scale),
      scale_parameter_(policy.scale_parameter) {
  if (!(clip_threshold_ > 0)) {
    fail("optim", "clip_threshold is ", clip_threshold_, "; use more than 0, such as 1");
  }
  if (!(decay_rate_ < 0)) {
    fail("optim", "decay_rate is ", decay_rate_, "; use less than 0, such as -0.8");
  }
}

std::vector<Moment> Adafactor::moments() const {
  Moment factors;
  factors.factored = true;
  return {factors};
}

Adafactor::Factors Adafactor::factors(const Span& span, std::int64_t update, Of of) const {
  const auto begins = begins_of(span);
  POISE_CHECK(span.moments[0].numel() == begins.back() && span.sums.at(0).numel() == begins.back());
  Factors made{at::empty({begins.back()}, at::kFloat), at::empty({begins.back()}, at::kFloat)};
  const auto* sums = span.sums[0].const_data_ptr<double>();
  const auto* old = span.moments[0].const_data_ptr<float>();
  auto* moments = made.moments.data_ptr<float>();
  auto* factors = made.factors.data_ptr<float>();
  const double rest = std::pow(static_cast<double>(update), decay_rate_), beta = 1 - rest;
  // Elements [begin, end), each a mean of `count` squares.
  const auto blend = [&](std::int64_t begin, std::int64_t end, std::int64_t count) {
    for (auto i = begin; i < end; ++i) {
      const double mean = sums[i] / static_cast<double>(count) + eps_square_;
      moments[i] = static_cast<float>(beta * old[i] + rest * mean);
      factors[i] = static_cast<float>(1 / std::sqrt(static_cast<double>(moments[i])));
    }
  };
  std::vector<bool> wanted(span.parameters.size(), of == Of::all);
  for (const Segment& s : span.segments) wanted[static_cast<std::size_t>(s.index)] = true;
  for (std::size_t p = 0; p < span.parameters.size(); ++p) {
    if (!wanted[p]) continue;
    const auto& sizes = span.parameters[p].sizes;
    const auto numel = numel_of(span.parameters[p]);
    if (sizes.size() < 2 || numel == 0) {
      blend(begins[p], begins[p + 1], 1);
      continue;
    }
    const auto rows = sizes[sizes.size() - 2], columns = sizes.back();
    const auto end_of_rows = begins[p] + numel / columns;
    blend(begins[p], end_of_rows, columns);
    blend(end_of_rows, begins[p + 1], rows);
    for (auto first = begins[p]; first < end_of_rows; first += rows) {  // of one matrix
      double mean = 0;
      for (auto i = first; i < first + rows; ++i) mean += moments[i];
      mean /= static_cast<double>(rows);
      for (auto i = first; i < first + rows; ++i) {
        factors[i] = static_cast<float>(std::sqrt(mean / moments[i]));
      }
    }
  }
  made.factors = made.factors.to(span.master.device());
  return made;
}

at::Tensor Adafactor::sums(int round, const Span& span, const std::vector<GroupSettings>& groups,
                           std::int64_t update, double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  const auto launch = launch_for(span.master.device());
  const auto segments = segments_of(span);
  const auto count = static_cast<std::int64_t>(segments.size());
  if (round == 0) {
    const auto out = at::zeros({begins_of(span).back()}, span.master.options().dtype(at::kDouble));
    kernels::factor_sums(launch, arrays_of(span), segments.data(), count, factor,
                         out.data_ptr<double>());
    return out;
  }
  const auto made = factors(span, update, Of::pieces);
  return squares_of(span, {[&](double* out) {
                             kernels::factored_squares(launch, arrays_of(span, made.factors),
                                                       segments.data(), count, factor, out);
                           },
                           [&](double* out) { weight_squares(span, out); }});
}

void Adafactor::apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                      double factor) const {
  check_span(span, groups, moments());
  const c10::DeviceGuard guard(span.master.device());
  const auto made = factors(span, update, Of::all);
  const auto steps = norms_of(span.sums.at(1), 0, 2), weights = norms_of(span.sums.at(1), 1, 2);
  auto segments = segments_of(span);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto index = static_cast<std::size_t>(span.segments[s].index);
    const GroupSettings& group = groups[static_cast<std::size_t>(span.segments[s].group)];
    const double root = std::sqrt(static_cast<double>(numel_of(span.parameters[index])));
    double lr = group.lr;
    if (scale_parameter_) lr *= std::max(eps_scale_, weights[index] / root);
    segments[s].lr = lr / std::max(1.0, steps[index] / root / clip_threshold_);
    segments[s].decay = lr * group.weight_decay;
  }
  kernels::adafactor(launch_for(span.master.device()), arrays_of(span, made.factors),
                     segments.data(), static_cast<std::int64_t>(segments.size()), factor);
  span.moments[0].copy_(made.moments);
}

}  // namespace poise::optim
