// LAMB on the GPU.
#include "kernels/lamb.h"

#include "kernels/cuda/segments.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

__device__ AdamState state_at(const AdamArrays& arrays, std::int64_t i) {
  return {arrays.master[i], arrays.moment1[i], arrays.moment2[i]};
}

// Returns the direction, whose square is summed.
template <class Gradient>
struct Direction {
  AdamArrays arrays;
  Segments<LambConstants> segments;
  __device__ float operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    return lamb_step(state_at(arrays, i), gradient, segments.constants(segment)).direction;
  }
};

template <class Gradient>
struct Update {
  AdamArrays arrays;
  Segments<LambConstants> segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const float gradient = to_float(static_cast<const Gradient*>(arrays.gradient)[i]);
    const AdamState next = lamb_body(state_at(arrays, i), gradient, segments.constants(segment));
    arrays.master[i] = next.master;
    arrays.moment1[i] = next.moment1;
    arrays.moment2[i] = next.moment2;
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

}  // namespace

void lamb_squares(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
                  std::int64_t num_segments, const AdamSettings& settings, double* squares) {
  const DeviceSegments<LambConstants> on_device(
      launch, segments, num_segments,
      [&](const LambSegment& s) { return lamb_constants(settings, s); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.sum(Direction<Gradient>{arrays, on_device.view()}, squares, "lamb_squares");
  });
}

void lamb(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
          std::int64_t num_segments, const AdamSettings& settings) {
  const DeviceSegments<LambConstants> on_device(
      launch, segments, num_segments,
      [&](const LambSegment& s) { return lamb_constants(settings, s); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.run(Update<Gradient>{arrays, on_device.view()}, "lamb");
  });
}

}  // namespace poise::kernels::cuda
