// Copying many arrays with cast and scale: filling buckets, writing low-precision copies.
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

// Source and target must not overlap.
struct PackPiece {
  const void* source = nullptr;
  void* target = nullptr;
  std::int64_t numel = 0;
};

// target[i] = target_dtype(scale * float(source[i])) for every piece. Equal types and scale 1 copy
// the bits.
POISE_API void pack(const Launch& launch, DType source_dtype, DType target_dtype,
                    const PackPiece* pieces, std::int64_t num_pieces, float scale);

POISE_BODY float pack_body(float value, float scale) { return value * scale; }

}  // namespace poise::kernels
