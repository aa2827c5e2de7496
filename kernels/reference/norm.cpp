// Sums of squares, element by element in the promised order.
#include <algorithm>

#include "kernels/backends.h"
#include "kernels/chunks.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {
namespace {

double chunk_sum(DType dtype, const void* base, std::int64_t begin, std::int64_t end) {
  double lanes[kLanes] = {};
  for (std::int64_t i = begin; i < end; ++i) {
    lanes[(i - begin) % kLanes] += square_body(load(dtype, base, i));
  }
  return join_lanes(lanes);
}

}  // namespace

void squared_norms(const Launch&, DType dtype, const void* base, const Piece* pieces,
                   std::int64_t num_pieces, double* out) {
  for (std::int64_t p = 0; p < num_pieces; ++p) {
    double sum = 0;
    for (std::int64_t begin = pieces[p].begin; begin < pieces[p].end; begin += kChunk) {
      sum += chunk_sum(dtype, base, begin, std::min(begin + kChunk, pieces[p].end));
    }
    out[p] = sum;
  }
}

}  // namespace poise::kernels::reference
