// AdamW with moments in bf16 and in 8 bits on the GPU.
#include "kernels/adamw_low.h"
#include "kernels/cuda/segments.h"
#include "kernels/cuda/store_low.h"

namespace poise::kernels::cuda {
namespace {

struct LowConstants {
  AdamConstants adam;
  RandomPlace place;
  bool decoupled;
};

LowConstants constants_of(const AdamSettings& settings, const RoundedSegment& segment) {
  return {adam_constants(settings, segment.lr, segment.weight_decay),
          {random_key(segment.key), segment.first},
          settings.decoupled};
}

__device__ AdamState next_of(const AdamState& old, float gradient, const LowConstants& constants) {
  return constants.decoupled ? adamw_body<true>(old, gradient, constants.adam)
                             : adamw_body<false>(old, gradient, constants.adam);
}

template <class Gradient>
struct UpdateBf16 {
  AdamBf16Arrays arrays;
  Segments<LowConstants> segments;
  __device__ void operator()(std::int64_t segment, std::int64_t offset) const {
    const std::int64_t i = segments.element(segment, offset);
    const LowConstants& constants = segments.constants(segment);
    const AdamState old{arrays.master[i], to_float(arrays.moment1[i]), to_float(arrays.moment2[i])};
    const AdamState next =
        next_of(old, to_float(static_cast<const Gradient*>(arrays.gradient)[i]), constants);
    const std::uint32_t bits = random_bits(constants.place.key, constants.place.first + offset);
    arrays.master[i] = next.master;
    arrays.moment1[i] = rounded_at_random(next.moment1, bits & 0xFFFFu);
    arrays.moment2[i] = rounded_at_random(next.moment2, bits >> 16);
    store_low(arrays.low, arrays.low_dtype, i, next.master);
  }
};

static_assert(kThreads == kQuantBlock, "a thread block takes one quantisation block at a time");

// One thread for each element of a block; the block's largest magnitudes meet in shared memory.
template <class Gradient>
__global__ void __launch_bounds__(kThreads)
    update_8bit(Spans spans, Adam8BitArrays arrays, Segments<LowConstants> segments) {
  __shared__ unsigned int largest1, largest2;
  for (std::int64_t number = blockIdx.x; number < spans.chunks; number += gridDim.x) {
    const Chunk chunk = chunk_at(spans, number);
    const LowConstants& constants = segments.constants(chunk.span);
    for (std::int64_t inside = 0; inside < chunk.count; inside += kQuantBlock) {
      const std::int64_t offset = chunk.offset + inside + threadIdx.x;
      const std::int64_t i = segments.element(chunk.span, offset);
      const bool mine = inside + threadIdx.x < chunk.count;
      const std::int64_t block = segments.element(chunk.span, chunk.offset + inside) / kQuantBlock;
      const float before1 = arrays.scale1[block], before2 = arrays.scale2[block];
      if (threadIdx.x == 0) largest1 = largest2 = 0;
      __syncthreads();
      float moment1 = 0, root2 = 0;
      if (mine) {
        const float root = decode_unsigned(arrays.code2[i], before2);
        const AdamState old{arrays.master[i], decode_signed(arrays.code1[i], before1), root * root};
        const AdamState next =
            next_of(old, to_float(static_cast<const Gradient*>(arrays.gradient)[i]), constants);
        arrays.master[i] = next.master;
        store_low(arrays.low, arrays.low_dtype, i, next.master);
        moment1 = next.moment1;
        root2 = sqrtf(next.moment2);
        // Magnitudes compare as their bits do; a maximum does not depend on the order.
        atomicMax(&largest1, bits_of(moment1) & 0x7FFFFFFFu);
        atomicMax(&largest2, bits_of(root2) & 0x7FFFFFFFu);
      }
      __syncthreads();
      const float after1 = float_of(largest1), after2 = float_of(largest2);
      if (mine) {
        const std::uint32_t bits = random_bits(constants.place.key, constants.place.first + offset);
        arrays.code1[i] = encode_signed(moment1, after1);
        arrays.code2[i] = encode_unsigned(root2, after2, bits);
      }
      if (threadIdx.x == 0) {
        arrays.scale1[block] = after1;
        arrays.scale2[block] = after2;
      }
      __syncthreads();  // the maxima are read before the next block sets them to zero
    }
  }
}

}  // namespace

void adamw_bf16(const Launch& launch, const AdamBf16Arrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  const DeviceSegments<LowConstants> on_device(
      launch, segments, num_segments,
      [&](const RoundedSegment& s) { return constants_of(settings, s); });
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    on_device.run(UpdateBf16<Gradient>{arrays, on_device.view()}, "adamw_bf16");
  });
}

void adamw_8bit(const Launch& launch, const Adam8BitArrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  const DeviceSegments<LowConstants> on_device(
      launch, segments, num_segments,
      [&](const RoundedSegment& s) { return constants_of(settings, s); });
  const Spans& spans = on_device.spans();
  if (spans.chunks == 0) return;
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    run_kernel(launch, "adamw_8bit", spans.chunks, kThreads, update_8bit<Gradient>, spans, arrays,
               on_device.view());
  });
}

}  // namespace poise::kernels::cuda
