// LAMB, element by element; square sums in the promised order.
#include "kernels/lamb.h"

#include <algorithm>

#include "kernels/backends.h"
#include "kernels/chunks.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {
namespace {

AdamState state_at(const AdamArrays& arrays, std::int64_t i) {
  return {arrays.master[i], arrays.moment1[i], arrays.moment2[i]};
}

}  // namespace

void lamb_squares(const Launch&, const AdamArrays& arrays, const LambSegment* segments,
                  std::int64_t num_segments, const AdamSettings& settings, double* squares) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const LambConstants constants = lamb_constants(settings, segments[s]);
    double sum = 0;
    for (std::int64_t begin = segments[s].begin; begin < segments[s].end; begin += kChunk) {
      const std::int64_t end = std::min(begin + kChunk, segments[s].end);
      double lanes[kLanes] = {};
      for (std::int64_t i = begin; i < end; ++i) {
        const float gradient = load(arrays.gradient_dtype, arrays.gradient, i);
        lanes[(i - begin) % kLanes] +=
            square_body(lamb_step(state_at(arrays, i), gradient, constants).direction);
      }
      sum += join_lanes(lanes);
    }
    squares[s] = sum;
  }
}

void lamb(const Launch&, const AdamArrays& arrays, const LambSegment* segments,
          std::int64_t num_segments, const AdamSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const LambConstants constants = lamb_constants(settings, segments[s]);
    for (std::int64_t i = segments[s].begin; i < segments[s].end; ++i) {
      const float gradient = load(arrays.gradient_dtype, arrays.gradient, i);
      const AdamState next = lamb_body(state_at(arrays, i), gradient, constants);
      arrays.master[i] = next.master;
      arrays.moment1[i] = next.moment1;
      arrays.moment2[i] = next.moment2;
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

}  // namespace poise::kernels::reference
