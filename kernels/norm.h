// Sum of squares and finite flag in one read. Sums are fp64 over fixed chunks of kChunk elements,
// kLanes virtual lanes each, joined in chunk order: their bits depend neither on threads nor on the
// back end. A sum is inf or NaN if and only if some element is (squares of floats do not overflow a
// double).
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

// Elements [begin, end) of an array.
struct Piece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// One sum per piece; chunks are counted from each piece's begin. `out` is host memory for the CPU
// back ends and device memory for CUDA.
POISE_API void squared_norms(const Launch& launch, DType dtype, const void* base,
                             const Piece* pieces, std::int64_t num_pieces, double* out);

inline constexpr int kLanes = 16;

POISE_BODY double square_body(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

// The one order in which lanes are added up.
POISE_BODY double join_lanes(double* lanes) {
  for (int stride = kLanes / 2; stride > 0; stride /= 2) {
    for (int lane = 0; lane < stride; ++lane) lanes[lane] += lanes[lane + stride];
  }
  return lanes[0];
}

}  // namespace poise::kernels
