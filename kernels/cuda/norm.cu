// Sums of squares on the GPU.
#include "kernels/cuda/launch.h"

namespace poise::kernels::cuda {
namespace {

template <class Element>
struct ReadPiece {
  const Element* base;
  const Piece* pieces;
  __device__ float operator()(std::int64_t piece, std::int64_t offset) const {
    return to_float(base[pieces[piece].begin + offset]);
  }
};

}  // namespace

void squared_norms(const Launch& launch, DType dtype, const void* base, const Piece* pieces,
                   std::int64_t num_pieces, double* out) {
  const ChunkMap chunks(num_pieces,
                        [&](std::int64_t p) { return pieces[p].end - pieces[p].begin; });
  const DeviceMap map(launch, chunks, pieces);
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const ReadPiece<Element> read{static_cast<const Element*>(base), map.rows()};
    run_each_lane(launch, map.spans(), read, out, "squared_norms");
  });
}

}  // namespace poise::kernels::cuda
