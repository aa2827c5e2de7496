// Lion, element by element.
#include <algorithm>

#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void lion(const Launch&, const LionArrays& arrays, const LionSegment* segments,
          std::int64_t num_segments, const LionSettings& settings) {
  each_element<LionState>(
      arrays, segments, num_segments,
      [&](const LionSegment& s) { return lion_constants(settings, s.lr, s.weight_decay); },
      lion_body);
}

void lion_8bit(const Launch&, const Lion8BitArrays& arrays, const RoundedSegment* segments,
               std::int64_t num_segments, const LionSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const RoundedSegment& segment = segments[s];
    const LionConstants constants = lion_constants(settings, segment.lr, segment.weight_decay);
    for (std::int64_t begin = segment.begin; begin < segment.end; begin += kQuantBlock) {
      const std::int64_t count = std::min(kQuantBlock, segment.end - begin);
      float& scale = arrays.scale[begin / kQuantBlock];
      float momentum[kQuantBlock];
      std::uint32_t largest = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = begin + i;
        const LionState old{arrays.master[at], decode_signed(arrays.code[at], scale)};
        const LionState next =
            lion_body(old, load(arrays.gradient_dtype, arrays.gradient, at), constants);
        arrays.master[at] = next.master;
        if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, at, next.master);
        momentum[i] = next.momentum;
        largest = larger(largest, momentum[i]);
      }
      scale = float_of(largest);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits =
            random_bits(random_key(segment.key), segment.first + begin - segment.begin + i);
        arrays.code[begin + i] = encode_signed(momentum[i], scale, random_rounding(bits));
      }
    }
  }
}

}  // namespace poise::kernels::reference
