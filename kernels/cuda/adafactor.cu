// Adafactor on the GPU.
#include "kernels/adafactor.h"

#include "kernels/cuda/segments.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

struct FactoredPiece {
  FactoredConstants constants;
  FactorLayout layout;
  std::int64_t first;
  std::int64_t numel;
  std::int64_t chunk;  // of factor_sums()
};

FactoredPiece piece_of(const FactoredSegment& segment, double factor) {
  return {factored_constants(segment, factor), segment.layout, segment.first,
          segment.end - segment.begin, factor_chunk(segment)};
}

// Dimensions that do not count for a row (or column) are at most one: its elements lie that far
// apart.
struct Line {
  std::int64_t base = 0, stride = 0, count = 1;
};

__device__ Line line_of(const FactorLayout& layout, const std::int64_t* steps,
                        std::int64_t number) {
  Line line;
  for (int d = 0; d < layout.dims; ++d) {
    if (steps[d] == 0) {
      line.stride = layout.stride[d];
      line.count = layout.size[d];
    } else {
      line.base += number / steps[d] % layout.size[d] * layout.stride[d];
    }
  }
  return line;
}

// One thread adds up one row or column, in the order of the CPU back ends.
template <class Gradient>
struct SumLine {
  FactoredArrays arrays;
  Segments<FactoredPiece> segments;
  double* sums;
  __device__ void operator()(std::int64_t segment, std::int64_t number) const {
    const FactoredPiece& piece = segments.constants(segment);
    const FactorLayout& layout = piece.layout;
    const bool is_row = number < layout.num_rows;
    const Line line = is_row ? line_of(layout, layout.row_step, number)
                             : line_of(layout, layout.column_step, number - layout.num_rows);
    double& total = sums[is_row ? layout.rows + number : layout.columns + number - layout.num_rows];
    double sum = 0;
    std::int64_t chunk = -1;
    for (std::int64_t k = 0; k < line.count; ++k) {
      const std::int64_t offset = line.base + k * line.stride - piece.first;
      if (offset < 0 || offset >= piece.numel) continue;
      if (offset / piece.chunk != chunk) {
        total += sum;
        sum = 0;
        chunk = offset / piece.chunk;
      }
      const std::int64_t i = segments.element(segment, offset);
      sum += square_body(to_float(static_cast<const Gradient*>(arrays.gradient)[i]) *
                         piece.constants.factor);
    }
    total += sum;
  }
};

template <class Gradient>
__device__ float step_at(const FactoredArrays& arrays, const Segments<FactoredPiece>& segments,
                         std::int64_t segment, std::int64_t offset) {
  const FactoredPiece& piece = segments.constants(segment);
  const FactorRun run = run_at(piece.layout, piece.first + offset);
  const float column = piece.constants.has_columns ? arrays.factors[run.column] : 1.0f;
  const std::int64_t i = segments.element(segment, offset);
  return factored_step(to_float(static_cast<const Gradient*>(arrays.gradient)[i]),
                       arrays.factors[run.row], column, piece.constants);
}

template <class Gradient>
struct Step {
  FactoredArrays arrays;
  Segments<FactoredPiece> segments;
  __device__ float operator()(std::int64_t segment, std::int64_t offset) const {
    return step_at<Gradient>(arrays, segments, segment, offset);
  }
};

template <class Gradient>
struct Update {
  FactoredArrays arrays;
  Segments<FactoredPiece> segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const float step = step_at<Gradient>(arrays, segments, segment, offset);
    const float next =
        adafactor_body(arrays.master[i], step, segments.constants(segment).constants);
    arrays.master[i] = next;
    store_low(arrays.low, arrays.low_dtype, i, next);
  }
};

}  // namespace

void factor_sums(const Launch& launch, const FactoredArrays& arrays,
                 const FactoredSegment* segments, std::int64_t num_segments, double factor,
                 double* sums) {
  const DeviceSegments<FactoredPiece> on_device(
      launch, segments, num_segments,
      [&](const FactoredSegment& s) { return piece_of(s, factor); });
  const ChunkMap lines(num_segments, [&](std::int64_t s) {
    return segments[s].layout.num_rows + segments[s].layout.num_columns;
  });
  const DeviceMap<> map(launch, lines);
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    run_each_element(launch, map.spans(), SumLine<Gradient>{arrays, on_device.view(), sums},
                     "factor_sums");
  });
}

void factored_squares(const Launch& launch, const FactoredArrays& arrays,
                      const FactoredSegment* segments, std::int64_t num_segments, double factor,
                      double* squares) {
  const DeviceSegments<FactoredPiece> on_device(
      launch, segments, num_segments,
      [&](const FactoredSegment& s) { return piece_of(s, factor); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.sum(Step<Gradient>{arrays, on_device.view()}, squares, "factored_squares");
  });
}

void adafactor(const Launch& launch, const FactoredArrays& arrays, const FactoredSegment* segments,
               std::int64_t num_segments, double factor) {
  const DeviceSegments<FactoredPiece> on_device(
      launch, segments, num_segments,
      [&](const FactoredSegment& s) { return piece_of(s, factor); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.run(Update<Gradient>{arrays, on_device.view()}, "adafactor");
  });
}

}  // namespace poise::kernels::cuda
