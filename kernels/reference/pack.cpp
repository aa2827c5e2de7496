// Copying with cast and scale, element by element.
#include <cstring>

#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void pack(const Launch&, DType source_dtype, DType target_dtype, const PackPiece* pieces,
          std::int64_t num_pieces, float scale) {
  for (std::int64_t p = 0; p < num_pieces; ++p) {
    const PackPiece& piece = pieces[p];
    if (source_dtype == target_dtype && scale == 1.0f) {
      if (piece.numel > 0) memcpy(piece.target, piece.source, piece.numel * size_of(source_dtype));
      continue;
    }
    for (std::int64_t i = 0; i < piece.numel; ++i) {
      const float value = load(source_dtype, piece.source, i);
      store(target_dtype, piece.target, i, pack_body(value, scale));
    }
  }
}

}  // namespace poise::kernels::reference
