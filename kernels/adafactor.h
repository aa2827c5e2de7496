// Adafactor: second moments of a matrix kept as those of its rows and columns. (Shazeer and Stern
// 2018, arXiv:1804.04235, without momentum.) Three kernels over a parameter's piece: what it adds
// to the sums of rows and columns, the square sum of the step that factors make, and the step.
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/cast.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

inline constexpr int kMostDims = 8;

// Which row and column an element of a parameter belongs to: its place in memory, taken apart by
// dimensions from the slowest to the fastest, adds so many steps to the numbers of row and column.
// A parameter of less than two dimensions has rows of one element and no columns.
struct FactorLayout {
  int dims = 0;
  std::int64_t size[kMostDims] = {};
  std::int64_t stride[kMostDims] = {};  // elements; the last one is 1
  std::int64_t row_step[kMostDims] = {};
  std::int64_t column_step[kMostDims] = {};
  std::int64_t rows = 0;     // where its rows begin in the array of factors
  std::int64_t columns = 0;  // where its columns do
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;  // 0: none
};

// `sizes` and `strides` of a dense parameter whose factors begin at `begin`, rows first. Throws
// Error on one of more dimensions than kernels take.
POISE_API FactorLayout factor_layout(const std::int64_t* sizes, const std::int64_t* strides,
                                     int dims, std::int64_t begin);

struct FactoredArrays {
  float* master = nullptr;
  void* low = nullptr;  // 16-bit copy of master; null: none
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  const float* factors = nullptr;  // of rows and columns; their product divides by the deviation
};

struct FactoredSegment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double lr = 0;           // over the clipping of the step
  double decay = 0;        // lr x weight decay
  std::int64_t first = 0;  // place of element `begin` in its parameter, in memory order
  FactorLayout layout;
};

// Square sums of gradient x factor by rows and columns: adds to `sums`, which is laid out as the
// factors are. Elements of a chunk of factor_chunk() in memory order, then chunks in order, in
// fp64. Host memory for the CPU back ends, device memory for CUDA.
POISE_API void factor_sums(const Launch& launch, const FactoredArrays& arrays,
                           const FactoredSegment* segments, std::int64_t num_segments,
                           double factor, double* sums);
// squares[s]: the square sum of segment s's step, as squared_norms() sums.
POISE_API void factored_squares(const Launch& launch, const FactoredArrays& arrays,
                                const FactoredSegment* segments, std::int64_t num_segments,
                                double factor, double* squares);
POISE_API void adafactor(const Launch& launch, const FactoredArrays& arrays,
                         const FactoredSegment* segments, std::int64_t num_segments, double factor);

// Elements of a chunk of a segment: at most 16 chunks, fewer where the sums themselves are many.
POISE_BODY std::int64_t factor_chunk(const FactoredSegment& segment) {
  const std::int64_t numel = segment.end - segment.begin;
  const std::int64_t sums = segment.layout.num_rows + segment.layout.num_columns;
  std::int64_t chunks = sums > 0 ? numel / (4 * sums) : 1;
  chunks = chunks < 1 ? 1 : chunks > 16 ? 16 : chunks;
  const std::int64_t length = (numel + chunks - 1) / chunks;
  return length > 4096 ? length : 4096;
}

// Elements from a place on that lie one after the other in memory and in the fastest dimension.
struct FactorRun {
  std::int64_t row, column;            // places in the array of factors
  std::int64_t row_step, column_step;  // from one element to the next
  std::int64_t left;                   // elements up to the end of the dimension
};

POISE_BODY FactorRun run_at(const FactorLayout& layout, std::int64_t place) {
  FactorRun run{layout.rows, layout.columns, 0, 0, 1};
  for (int d = 0; d < layout.dims; ++d) {
    const std::int64_t index = place / layout.stride[d] % layout.size[d];
    run.row += index * layout.row_step[d];
    run.column += index * layout.column_step[d];
    run.row_step = layout.row_step[d];
    run.column_step = layout.column_step[d];
    run.left = layout.size[d] - index;
  }
  return run;
}

// Settings of a segment, rounded once from double.
struct FactoredConstants {
  float factor;
  float lr;
  float decay;
  bool has_columns;
};

POISE_BODY FactoredConstants factored_constants(const FactoredSegment& segment, double factor) {
  return {static_cast<float>(factor), static_cast<float>(segment.lr),
          static_cast<float>(segment.decay), segment.layout.num_columns > 0};
}

POISE_BODY float factored_step(float gradient, float row, float column,
                               const FactoredConstants& constants) {
  return row * column * (gradient * constants.factor);
}

POISE_BODY float adafactor_body(float master, float step, const FactoredConstants& constants) {
  // Not master x (1 - decay): that factor, rounded, would be off in the same way at every update.
  return master - (constants.decay * master + constants.lr * step);
}

}  // namespace poise::kernels
