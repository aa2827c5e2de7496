// SGD on the GPU.
#include "kernels/cuda/segments.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

template <class Gradient>
struct Update {
  SgdArrays arrays;
  Segments<SgdConstants> segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const bool with_momentum = arrays.momentum != nullptr;
    const SgdState old{arrays.master[i], with_momentum ? arrays.momentum[i] : 0.0f};
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    const SgdState next = sgd_body(old, gradient, segments.constants(segment));
    arrays.master[i] = next.master;
    if (with_momentum) arrays.momentum[i] = next.momentum;
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

}  // namespace

void sgd(const Launch& launch, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  const DeviceSegments<SgdConstants> on_device(
      launch, segments, num_segments,
      [&](const SgdSegment& s) { return sgd_constants(settings, s.lr, s.weight_decay); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.run(Update<Gradient>{arrays, on_device.view()}, "sgd");
  });
}

}  // namespace poise::kernels::cuda
