// Lion over one chunk.
#include "kernels/cpu/each_element.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

// One block: `code`, `master` and `gradient` from its first element on.
template <class Gradient>
void update_block(float* __restrict master, const Gradient* __restrict gradient,
                  std::uint8_t* __restrict code, float* scale, std::int64_t count,
                  const LionConstants& constants, RandomPlace place) {
  float momentum[kQuantBlock];
  const float before = *scale;
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const LionState old{master[i], decode_signed(code[i], before)};
    const LionState next = lion_body(old, to_float(gradient[i]), constants);
    master[i] = next.master;
    momentum[i] = next.momentum;
  }
  for (std::int64_t i = 0; i < count; ++i) largest = larger(largest, momentum[i]);
  const float after = float_of(largest);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = random_bits(place.key, place.first + i);
    code[i] = encode_signed(momentum[i], after, random_rounding(bits));
  }
  *scale = after;
}

}  // namespace

void lion(const LionArrays& arrays, std::int64_t begin, std::int64_t count,
          const LionConstants& constants) {
  each_element<LionState>(arrays, begin, count, [constants](LionState old, float gradient) {
    return lion_body(old, gradient, constants);
  });
}

void lion_8bit(const Lion8BitArrays& arrays, std::int64_t begin, std::int64_t count,
               const LionConstants& constants, const RandomPlace& place) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    for (std::int64_t offset = 0; offset < count; offset += kQuantBlock) {
      const std::int64_t at = begin + offset, left = count - offset;
      update_block(arrays.master + at, static_cast<const Gradient*>(arrays.gradient) + at,
                   arrays.code + at, arrays.scale + at / kQuantBlock,
                   left < kQuantBlock ? left : kQuantBlock, constants,
                   {place.key, place.first + offset});
    }
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace poise::kernels::cpu::POISE_ISA
