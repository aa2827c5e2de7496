// SGD on the GPU.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

struct Prepared {
  std::int64_t begin;
  SgdConstants constants;
};

template <class Gradient>
struct Update {
  SgdArrays arrays;
  const Prepared* segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments[segment].begin + offset;
    const bool with_momentum = arrays.momentum != nullptr;
    const SgdState old{arrays.master[i], with_momentum ? arrays.momentum[i] : 0.0f};
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    const SgdState next = sgd_body(old, gradient, segments[segment].constants);
    arrays.master[i] = next.master;
    if (with_momentum) arrays.momentum[i] = next.momentum;
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

}  // namespace

void sgd(const Launch& launch, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  const cudaStream_t stream = stream_of(launch);
  std::vector<Prepared> prepared;
  prepared.reserve(static_cast<std::size_t>(num_segments));
  for (std::int64_t s = 0; s < num_segments; ++s) {
    prepared.push_back(
        {segments[s].begin, sgd_constants(settings, segments[s].lr, segments[s].weight_decay)});
  }
  const ChunkMap chunks(num_segments,
                        [&](std::int64_t s) { return segments[s].end - segments[s].begin; });
  const DeviceMap map(chunks, stream);
  const DeviceArray<Prepared> device_segments(prepared.data(), num_segments, stream);
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    run_each_element(launch, map, Update<Gradient>{arrays, device_segments.data()}, "sgd");
  });
}

}  // namespace poise::kernels::cuda
