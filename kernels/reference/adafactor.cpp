// Adafactor, element by element.
#include "kernels/adafactor.h"

#include <algorithm>
#include <vector>

#include "kernels/backends.h"
#include "kernels/chunks.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {
namespace {

float step_at(const FactoredArrays& arrays, const FactoredSegment& segment, std::int64_t i,
              const FactoredConstants& constants) {
  const FactorRun run = run_at(segment.layout, segment.first + i - segment.begin);
  const float column = constants.has_columns ? arrays.factors[run.column] : 1.0f;
  return factored_step(load(arrays.gradient_dtype, arrays.gradient, i), arrays.factors[run.row],
                       column, constants);
}

}  // namespace

void factor_sums(const Launch&, const FactoredArrays& arrays, const FactoredSegment* segments,
                 std::int64_t num_segments, double factor, double* sums) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const FactoredSegment& segment = segments[s];
    const FactorLayout& layout = segment.layout;
    const FactoredConstants constants = factored_constants(segment, factor);
    const std::int64_t length = factor_chunk(segment);
    for (std::int64_t begin = segment.begin; begin < segment.end; begin += length) {
      std::vector<double> rows(static_cast<std::size_t>(layout.num_rows));
      std::vector<double> columns(static_cast<std::size_t>(layout.num_columns));
      for (std::int64_t i = begin; i < std::min(begin + length, segment.end); ++i) {
        const FactorRun run = run_at(layout, segment.first + i - segment.begin);
        const float gradient = load(arrays.gradient_dtype, arrays.gradient, i) * constants.factor;
        const double square = square_body(gradient);
        rows[static_cast<std::size_t>(run.row - layout.rows)] += square;
        if (!constants.has_columns) continue;
        columns[static_cast<std::size_t>(run.column - layout.columns)] += square;
      }
      for (std::size_t k = 0; k < rows.size(); ++k) {
        sums[layout.rows + static_cast<std::int64_t>(k)] += rows[k];
      }
      for (std::size_t k = 0; k < columns.size(); ++k) {
        sums[layout.columns + static_cast<std::int64_t>(k)] += columns[k];
      }
    }
  }
}

void factored_squares(const Launch&, const FactoredArrays& arrays, const FactoredSegment* segments,
                      std::int64_t num_segments, double factor, double* squares) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const FactoredSegment& segment = segments[s];
    const FactoredConstants constants = factored_constants(segment, factor);
    squares[s] = 0;
    for (std::int64_t begin = segment.begin; begin < segment.end; begin += kChunk) {
      double lanes[kLanes] = {};
      for (std::int64_t i = begin; i < std::min(begin + kChunk, segment.end); ++i) {
        lanes[(i - begin) % kLanes] += square_body(step_at(arrays, segment, i, constants));
      }
      squares[s] += join_lanes(lanes);
    }
  }
}

void adafactor(const Launch&, const FactoredArrays& arrays, const FactoredSegment* segments,
               std::int64_t num_segments, double factor) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const FactoredSegment& segment = segments[s];
    const FactoredConstants constants = factored_constants(segment, factor);
    for (std::int64_t i = segment.begin; i < segment.end; ++i) {
      const float step = step_at(arrays, segment, i, constants);
      arrays.master[i] = adafactor_body(arrays.master[i], step, constants);
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, arrays.master[i]);
    }
  }
}

}  // namespace poise::kernels::reference
