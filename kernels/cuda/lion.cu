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

struct RoundedConstants {
  LionConstants lion;
  RandomPlace place;
};

static_assert(kThreads == kQuantBlock, "a thread block takes one quantisation block at a time");

// One thread for each element of a block; the block's largest magnitude meets in shared memory.
template <class Gradient>
__global__ void __launch_bounds__(kThreads)
    update_8bit(Spans spans, Lion8BitArrays arrays, Segments<RoundedConstants> segments) {
  __shared__ unsigned int largest;
  for (std::int64_t number = blockIdx.x; number < spans.chunks; number += gridDim.x) {
    const Chunk chunk = chunk_at(spans, number);
    const RoundedConstants& constants = segments.constants(chunk.span);
    for (std::int64_t inside = 0; inside < chunk.count; inside += kQuantBlock) {
      const std::int64_t offset = chunk.offset + inside + threadIdx.x;
      const std::int64_t i = segments.element(chunk.span, offset);
      const bool mine = inside + threadIdx.x < chunk.count;
      const std::int64_t block = segments.element(chunk.span, chunk.offset + inside) / kQuantBlock;
      const float before = arrays.scale[block];
      if (threadIdx.x == 0) largest = 0;
      __syncthreads();
      float momentum = 0;
      if (mine) {
        const LionState old{arrays.master[i], decode_signed(arrays.code[i], before)};
        const LionState next = lion_body(
            old, to_float(static_cast<const Gradient*>(arrays.gradient)[i]), constants.lion);
        arrays.master[i] = next.master;
        store_low(arrays.low, arrays.low_dtype, i, next.master);
        momentum = next.momentum;
        // Magnitudes compare as their bits do; a maximum does not depend on the order.
        atomicMax(&largest, bits_of(momentum) & 0x7FFFFFFFu);
      }
      __syncthreads();
      const float after = float_of(largest);
      if (mine) {
        const std::uint32_t bits = random_bits(constants.place.key, constants.place.first + offset);
        arrays.code[i] = encode_signed(momentum, after, random_rounding(bits));
      }
      if (threadIdx.x == 0) arrays.scale[block] = after;
      __syncthreads();  // the maximum is read before the next block sets it to zero
    }
  }
}

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

void lion_8bit(const Launch& launch, const Lion8BitArrays& arrays, const RoundedSegment* segments,
               std::int64_t num_segments, const LionSettings& settings) {
  const DeviceSegments<RoundedConstants> on_device(
      launch, segments, num_segments, [&](const RoundedSegment& s) {
        return RoundedConstants{lion_constants(settings, s.lr, s.weight_decay),
                                {random_key(s.key), s.first}};
      });
  const Spans& spans = on_device.spans();
  if (spans.chunks == 0) return;
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    run_kernel(launch, "lion_8bit", spans.chunks, kThreads, update_8bit<Gradient>, spans, arrays,
               on_device.view());
  });
}

}  // namespace poise::kernels::cuda
