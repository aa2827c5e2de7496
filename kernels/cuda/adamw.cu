// AdamW and Adam on the GPU.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

// A segment with its settings rounded on the host, so that both sides use the same bits.
struct Prepared {
  std::int64_t begin;
  AdamConstants constants;
};

template <bool decoupled, class Gradient>
struct Update {
  AdamArrays arrays;
  const Prepared* segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments[segment].begin + offset;
    const AdamState old{arrays.master[i], arrays.moment1[i], arrays.moment2[i]};
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    const AdamState next = adamw_body<decoupled>(old, gradient, segments[segment].constants);
    arrays.master[i] = next.master;
    arrays.moment1[i] = next.moment1;
    arrays.moment2[i] = next.moment2;
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

}  // namespace

void adamw(const Launch& launch, const AdamArrays& arrays, const AdamSegment* segments,
           std::int64_t num_segments, const AdamSettings& settings) {
  const cudaStream_t stream = stream_of(launch);
  std::vector<Prepared> prepared;
  prepared.reserve(static_cast<std::size_t>(num_segments));
  for (std::int64_t s = 0; s < num_segments; ++s) {
    prepared.push_back(
        {segments[s].begin, adam_constants(settings, segments[s].lr, segments[s].weight_decay)});
  }
  const ChunkMap chunks(num_segments,
                        [&](std::int64_t s) { return segments[s].end - segments[s].begin; });
  const DeviceMap map(chunks, stream);
  const DeviceArray<Prepared> device_segments(prepared.data(), num_segments, stream);
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    if (settings.decoupled) {
      run_each_element(launch, map, Update<true, Gradient>{arrays, device_segments.data()},
                       "adamw");
    } else {
      run_each_element(launch, map, Update<false, Gradient>{arrays, device_segments.data()},
                       "adam");
    }
  });
}

}  // namespace poise::kernels::cuda
