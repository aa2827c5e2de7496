// AdamW with moments in bf16 and in 8 bits, element by element.
#include "kernels/adamw_low.h"

#include <algorithm>

#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {
namespace {

AdamState next_of(const AdamState& old, float gradient, const AdamConstants& constants,
                  bool decoupled) {
  return decoupled ? adamw_body<true>(old, gradient, constants)
                   : adamw_body<false>(old, gradient, constants);
}

}  // namespace

void adamw_bf16(const Launch&, const AdamBf16Arrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const RoundedSegment& segment = segments[s];
    const AdamConstants constants = adam_constants(settings, segment.lr, segment.weight_decay);
    for (std::int64_t i = segment.begin; i < segment.end; ++i) {
      const AdamState next =
          next_of({arrays.master[i], to_float(arrays.moment1[i]), to_float(arrays.moment2[i])},
                  load(arrays.gradient_dtype, arrays.gradient, i), constants, settings.decoupled);
      const std::uint32_t bits =
          random_bits(random_key(segment.key), segment.first + i - segment.begin);
      arrays.master[i] = next.master;
      arrays.moment1[i] = rounded_at_random(next.moment1, bits & 0xFFFFu);
      arrays.moment2[i] = rounded_at_random(next.moment2, bits >> 16);
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

void adamw_8bit(const Launch&, const Adam8BitArrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const RoundedSegment& segment = segments[s];
    const AdamConstants constants = adam_constants(settings, segment.lr, segment.weight_decay);
    for (std::int64_t begin = segment.begin; begin < segment.end; begin += kQuantBlock) {
      const std::int64_t count = std::min(kQuantBlock, segment.end - begin);
      float& scale1 = arrays.scale1[begin / kQuantBlock];
      float& scale2 = arrays.scale2[begin / kQuantBlock];
      float moment1[kQuantBlock], root2[kQuantBlock];
      std::uint32_t largest1 = 0, largest2 = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = begin + i;
        const float root = decode_unsigned(arrays.code2[at], scale2);
        const AdamState next = next_of(
            {arrays.master[at], decode_signed(arrays.code1[at], scale1), root * root},
            load(arrays.gradient_dtype, arrays.gradient, at), constants, settings.decoupled);
        arrays.master[at] = next.master;
        if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, at, next.master);
        moment1[i] = next.moment1;
        root2[i] = sqrtf(next.moment2);
        largest1 = larger(largest1, moment1[i]);
        largest2 = larger(largest2, root2[i]);
      }
      scale1 = float_of(largest1);
      scale2 = float_of(largest2);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits =
            random_bits(random_key(segment.key), segment.first + begin - segment.begin + i);
        arrays.code1[begin + i] = encode_signed(moment1[i], scale1);
        arrays.code2[begin + i] = encode_unsigned(root2[i], scale2, bits);
      }
    }
  }
}

}  // namespace poise::kernels::reference
