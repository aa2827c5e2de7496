// The entrances to the kernels: settings are checked and rounded here, then a back end does the
// work.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/backends.h"
#include "poise/error.h"

namespace poise::kernels {

void squared_norms(const Launch& launch, DType dtype, const void* base, const Piece* pieces,
                   std::int64_t num_pieces, double* out) {
  POISE_CHECK(num_pieces >= 0);
  POISE_KERNEL_DISPATCH(launch, squared_norms, launch, dtype, base, pieces, num_pieces, out)
}

void accumulate(const Launch& launch, Accumulate mode, float* accumulator, DType gradient_dtype,
                const void* gradient, std::int64_t numel, float weight, double* sum_of_squares) {
  POISE_CHECK(numel >= 0);
  POISE_KERNEL_DISPATCH(launch, accumulate, launch, mode, accumulator, gradient_dtype, gradient,
                        numel, weight, sum_of_squares)
}

AdamConstants adam_constants(const AdamSettings& settings, double lr, double weight_decay) {
  POISE_CHECK(settings.step >= 1, "updates are counted from 1");
  const auto step = static_cast<double>(settings.step);
  const double correction1 = 1.0 - std::pow(settings.beta1, step);
  const double correction2 = 1.0 - std::pow(settings.beta2, step);
  AdamConstants constants{};
  constants.factor = static_cast<float>(settings.factor);
  constants.beta1 = static_cast<float>(settings.beta1);
  constants.rest1 = static_cast<float>(1.0 - settings.beta1);
  constants.beta2 = static_cast<float>(settings.beta2);
  constants.rest2 = static_cast<float>(1.0 - settings.beta2);
  constants.root_correction = static_cast<float>(1.0 / std::sqrt(correction2));
  constants.eps = static_cast<float>(settings.eps);
  constants.step_size = static_cast<float>(lr / correction1);
  constants.keep = static_cast<float>(1.0 - lr * weight_decay);
  constants.l2 = static_cast<float>(weight_decay);
  return constants;
}

void adamw(const Launch& launch, const AdamArrays& arrays, const AdamSegment* segments,
           std::int64_t num_segments, const AdamSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_KERNEL_DISPATCH(launch, adamw, launch, arrays, segments, num_segments, settings)
}

void adamw_bf16(const Launch& launch, const AdamBf16Arrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_KERNEL_DISPATCH(launch, adamw_bf16, launch, arrays, segments, num_segments, settings)
}

namespace {

// A scale's block belongs to one segment.
void check_blocks(const RoundedSegment* segments, std::int64_t num_segments) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    POISE_CHECK(segments[s].begin % kQuantBlock == 0, segments[s].begin);
  }
}

}  // namespace

void adamw_8bit(const Launch& launch, const Adam8BitArrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  check_blocks(segments, num_segments);
  POISE_KERNEL_DISPATCH(launch, adamw_8bit, launch, arrays, segments, num_segments, settings)
}

FactorLayout factor_layout(const std::int64_t* sizes, const std::int64_t* strides, int dims,
                           std::int64_t begin) {
  FactorLayout layout;
  struct Dim {
    std::int64_t size, stride, row_step, column_step;
  };
  std::vector<Dim> found;
  std::int64_t numel = 1, row_step = 1, column_step = 1;
  for (int d = 0; d < dims; ++d) numel *= sizes[d];
  for (int d = dims - 1; d >= 0; --d) {  // rows count all but the last dimension, columns all but
    const bool last = d == dims - 1, last_but_one = d == dims - 2;  // the last but one
    found.push_back({sizes[d], strides[d], last ? 0 : row_step, last_but_one ? 0 : column_step});
    if (!last) row_step *= sizes[d];
    if (!last_but_one) column_step *= sizes[d];
  }
  layout.rows = begin;
  layout.num_rows = dims < 2 || numel == 0 ? numel : numel / sizes[dims - 1];
  layout.num_columns = dims < 2 || numel == 0 ? 0 : numel / sizes[dims - 2];
  layout.columns = begin + layout.num_rows;
  if (dims < 2) found = {{numel, 1, 1, 0}};
  std::erase_if(found, [](const Dim& d) { return d.size == 1; });
  if (found.empty()) found = {{1, 1, 1, 1}};
  std::stable_sort(found.begin(), found.end(),
                   [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  std::vector<Dim> joined;  // dimensions that count on as one are one
  for (const Dim& inner : found) {
    if (!joined.empty()) {
      Dim& outer = joined.back();
      const auto counts_on = [&](std::int64_t Dim::*step) {
        return outer.*step == inner.*step * inner.size;
      };
      if (counts_on(&Dim::stride) && counts_on(&Dim::row_step) && counts_on(&Dim::column_step)) {
        outer = {outer.size * inner.size, inner.stride, inner.row_step, inner.column_step};
        continue;
      }
    }
    joined.push_back(inner);
  }
  if (joined.size() > kMostDims) {
    fail("kernels", "a factored parameter of ", dims, " dimensions, ", joined.size(),
         " of them apart in memory; adafactor takes ", kMostDims,
         ": make it contiguous, or use another optimizer");
  }
  for (const Dim& d : joined) {
    layout.size[layout.dims] = d.size;
    layout.stride[layout.dims] = d.stride;
    layout.row_step[layout.dims] = d.row_step;
    layout.column_step[layout.dims] = d.column_step;
    ++layout.dims;
  }
  return layout;
}

void factor_sums(const Launch& launch, const FactoredArrays& arrays,
                 const FactoredSegment* segments, std::int64_t num_segments, double factor,
                 double* sums) {
  POISE_KERNEL_DISPATCH(launch, factor_sums, launch, arrays, segments, num_segments, factor, sums)
}

void factored_squares(const Launch& launch, const FactoredArrays& arrays,
                      const FactoredSegment* segments, std::int64_t num_segments, double factor,
                      double* squares) {
  POISE_KERNEL_DISPATCH(launch, factored_squares, launch, arrays, segments, num_segments, factor,
                        squares)
}

void adafactor(const Launch& launch, const FactoredArrays& arrays, const FactoredSegment* segments,
               std::int64_t num_segments, double factor) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_KERNEL_DISPATCH(launch, adafactor, launch, arrays, segments, num_segments, factor)
}

LambConstants lamb_constants(const AdamSettings& settings, const LambSegment& segment) {
  POISE_CHECK(settings.step >= 1, "updates are counted from 1");
  const auto step = static_cast<double>(settings.step);
  LambConstants constants{};
  constants.factor = static_cast<float>(settings.factor);
  constants.beta1 = static_cast<float>(settings.beta1);
  constants.rest1 = static_cast<float>(1.0 - settings.beta1);
  constants.beta2 = static_cast<float>(settings.beta2);
  constants.rest2 = static_cast<float>(1.0 - settings.beta2);
  constants.correction1 = static_cast<float>(1.0 / (1.0 - std::pow(settings.beta1, step)));
  constants.root_correction2 =
      static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(settings.beta2, step)));
  constants.eps = static_cast<float>(settings.eps);
  constants.decay = static_cast<float>(segment.weight_decay);
  constants.step_size = static_cast<float>(segment.lr * segment.trust);
  return constants;
}

void lamb_squares(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
                  std::int64_t num_segments, const AdamSettings& settings, double* squares) {
  POISE_KERNEL_DISPATCH(launch, lamb_squares, launch, arrays, segments, num_segments, settings,
                        squares)
}

void lamb(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
          std::int64_t num_segments, const AdamSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_KERNEL_DISPATCH(launch, lamb, launch, arrays, segments, num_segments, settings)
}

LarsConstants lars_constants(const LarsSettings& settings, double lr, double weight_decay) {
  return {static_cast<float>(settings.factor), static_cast<float>(settings.momentum),
          static_cast<float>(lr), static_cast<float>(weight_decay)};
}

void lars(const Launch& launch, const LarsArrays& arrays, const LarsSegment* segments,
          std::int64_t num_segments, const LarsSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_KERNEL_DISPATCH(launch, lars, launch, arrays, segments, num_segments, settings)
}

LionConstants lion_constants(const LionSettings& settings, double lr, double weight_decay) {
  LionConstants constants{};
  constants.factor = static_cast<float>(settings.factor);
  constants.beta1 = static_cast<float>(settings.beta1);
  constants.rest1 = static_cast<float>(1.0 - settings.beta1);
  constants.beta2 = static_cast<float>(settings.beta2);
  constants.rest2 = static_cast<float>(1.0 - settings.beta2);
  constants.lr = static_cast<float>(lr);
  constants.keep = static_cast<float>(1.0 - lr * weight_decay);
  return constants;
}

void lion(const Launch& launch, const LionArrays& arrays, const LionSegment* segments,
          std::int64_t num_segments, const LionSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_KERNEL_DISPATCH(launch, lion, launch, arrays, segments, num_segments, settings)
}

void lion_8bit(const Launch& launch, const Lion8BitArrays& arrays, const RoundedSegment* segments,
               std::int64_t num_segments, const LionSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  check_blocks(segments, num_segments);
  POISE_KERNEL_DISPATCH(launch, lion_8bit, launch, arrays, segments, num_segments, settings)
}

SgdConstants sgd_constants(const SgdSettings& settings, double lr, double weight_decay) {
  return SgdConstants{static_cast<float>(settings.factor), static_cast<float>(weight_decay),
                      static_cast<float>(settings.momentum), static_cast<float>(lr),
                      settings.nesterov};
}

void sgd(const Launch& launch, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  POISE_CHECK(arrays.low == nullptr || arrays.low_dtype != DType::f32);
  POISE_CHECK(arrays.momentum != nullptr || settings.momentum == 0);
  POISE_KERNEL_DISPATCH(launch, sgd, launch, arrays, segments, num_segments, settings)
}

void pack(const Launch& launch, DType source_dtype, DType target_dtype, const PackPiece* pieces,
          std::int64_t num_pieces, float scale) {
  POISE_CHECK(num_pieces >= 0);
  POISE_KERNEL_DISPATCH(launch, pack, launch, source_dtype, target_dtype, pieces, num_pieces, scale)
}

}  // namespace poise::kernels
