// Square sums by segment, put to their parameters.
#include "optim/trust.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "core/launch.h"
#include "kernels/norm.h"
#include "poise/error.h"

namespace poise::optim {
namespace {

std::vector<kernels::Piece> pieces_of(const Span& span) {
  std::vector<kernels::Piece> pieces;
  for (const Segment& s : span.segments) pieces.push_back({s.begin, s.end});
  return pieces;
}

void squares(const Span& span, const at::Tensor& values, double* out) {
  const auto pieces = pieces_of(span);
  kernels::squared_norms(launch_for(values.device()), kernel_dtype(values.scalar_type()),
                         values.const_data_ptr(), pieces.data(),
                         static_cast<std::int64_t>(pieces.size()), out);
}

}  // namespace

at::Tensor squares_of(const Span& span, const std::vector<std::function<void(double* out)>>& fill) {
  const auto parameters = static_cast<std::int64_t>(span.parameters.size());
  const auto segments = static_cast<std::int64_t>(span.segments.size());
  const auto doubles = span.master.options().dtype(at::kDouble);
  const auto sums = at::zeros({parameters, static_cast<std::int64_t>(fill.size())}, doubles);
  auto indices = at::empty({segments}, at::kLong);
  for (std::int64_t s = 0; s < segments; ++s) {
    const int index = span.segments[static_cast<std::size_t>(s)].index;
    POISE_CHECK(index >= 0 && index < parameters, index);
    indices.data_ptr<std::int64_t>()[s] = index;
  }
  indices = indices.to(span.master.device());
  const auto by_segment = at::empty({segments}, doubles);
  for (std::size_t k = 0; k < fill.size(); ++k) {
    fill[k](by_segment.data_ptr<double>());
    sums.select(1, static_cast<std::int64_t>(k)).index_copy_(0, indices, by_segment);
  }
  return sums.view({-1});
}

std::vector<double> norms_of(const at::Tensor& sums, std::size_t k, std::size_t count) {
  std::vector<double> norms;
  const auto* values = sums.const_data_ptr<double>();
  for (auto at = k; at < static_cast<std::size_t>(sums.numel()); at += count) {
    norms.push_back(std::sqrt(values[at]));
  }
  return norms;
}

void weight_squares(const Span& span, double* out) { squares(span, span.master, out); }
void gradient_squares(const Span& span, double* out) { squares(span, span.gradient, out); }

}  // namespace poise::optim
