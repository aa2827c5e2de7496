// Copying with cast and scale on the GPU.
#include "kernels/cuda/launch.h"

namespace poise::kernels::cuda {
namespace {

template <class Source, class Target>
struct Convert {
  const PackPiece* pieces;
  float scale;
  __device__ void operator()(std::int64_t piece, std::int64_t i) const {
    const auto* source = static_cast<const Source*>(pieces[piece].source);
    auto* target = static_cast<Target*>(pieces[piece].target);
    target[i] = from_float<Target>(pack_body(to_float(source[i]), scale));
  }
};

template <class Element>
struct CopyBits {
  const PackPiece* pieces;
  __device__ void operator()(std::int64_t piece, std::int64_t i) const {
    static_cast<Element*>(pieces[piece].target)[i] =
        static_cast<const Element*>(pieces[piece].source)[i];
  }
};

}  // namespace

void pack(const Launch& launch, DType source_dtype, DType target_dtype, const PackPiece* pieces,
          std::int64_t num_pieces, float scale) {
  const ChunkMap chunks(num_pieces, [&](std::int64_t p) { return pieces[p].numel; });
  const DeviceMap map(launch, chunks, pieces);
  const bool same = source_dtype == target_dtype && scale == 1.0f;
  with_element(source_dtype, [&](auto from) {
    using Source = decltype(from);
    if (same) {
      run_each_element(launch, map.spans(), CopyBits<Source>{map.rows()}, "pack");
      return;
    }
    with_element(target_dtype, [&](auto to) {
      using Target = decltype(to);
      run_each_element(launch, map.spans(), Convert<Source, Target>{map.rows(), scale}, "pack");
    });
  });
}

}  // namespace poise::kernels::cuda
