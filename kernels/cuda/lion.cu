// Lion on the GPU.
#include "kernels/cuda/segments.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

template <class Gradient>
struct Update {
  LionArrays arrays;
  Segments<LionConstants> segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    const LionState next =
        lion_body({arrays.master[i], arrays.momentum[i]}, gradient, segments.constants(segment));
    arrays.master[i] = next.master;
    arrays.momentum[i] = next.momentum;
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

}  // namespace

void lion(const Launch& launch, const LionArrays& arrays, const LionSegment* segments,
          std::int64_t num_segments, const LionSettings& settings) {
  const DeviceSegments<LionConstants> on_device(
      launch, segments, num_segments,
      [&](const LionSegment& s) { return lion_constants(settings, s.lr, s.weight_decay); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.run(Update<Gradient>{arrays, on_device.view()}, "lion");
  });
}

}  // namespace poise::kernels::cuda
