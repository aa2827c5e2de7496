// AdamW and Adam on the GPU.
#include "kernels/cuda/segments.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

template <bool decoupled, class Gradient>
struct Update {
  AdamArrays arrays;
  Segments<AdamConstants> segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const AdamState old{arrays.master[i], arrays.moment1[i], arrays.moment2[i]};
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    const AdamState next = adamw_body<decoupled>(old, gradient, segments.constants(segment));
    arrays.master[i] = next.master;
    arrays.moment1[i] = next.moment1;
    arrays.moment2[i] = next.moment2;
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

}  // namespace

void adamw(const Launch& launch, const AdamArrays& arrays, const AdamSegment* segments,
           std::int64_t num_segments, const AdamSettings& settings) {
  const DeviceSegments<AdamConstants> on_device(
      launch, segments, num_segments,
      [&](const AdamSegment& s) { return adam_constants(settings, s.lr, s.weight_decay); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    if (settings.decoupled) {
      on_device.run(Update<true, Gradient>{arrays, on_device.view()}, "adamw");
    } else {
      on_device.run(Update<false, Gradient>{arrays, on_device.view()}, "adam");
    }
  });
}

}  // namespace poise::kernels::cuda
