// AdamW with moments in bf16 and in 8 bits over one chunk.
#include "kernels/adamw_low.h"
#include "kernels/cpu/copy_low.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <bool decoupled, class Gradient>
void update_bf16(float* __restrict master, const Gradient* __restrict gradient,
                 Bf16* __restrict moment1, Bf16* __restrict moment2, std::int64_t count,
                 AdamConstants constants, RandomPlace place) {
  for (std::int64_t i = 0; i < count; ++i) {
    const AdamState old{master[i], to_float(moment1[i]), to_float(moment2[i])};
    const AdamState next = adamw_body<decoupled>(old, to_float(gradient[i]), constants);
    const std::uint32_t bits = random_bits(place.key, place.first + i);
    master[i] = next.master;
    moment1[i] = rounded_at_random(next.moment1, bits & 0xFFFFu);
    moment2[i] = rounded_at_random(next.moment2, bits >> 16);
  }
}

// One block: `code1`, `code2`, `master` and `gradient` from its first element on.
template <bool decoupled, class Gradient>
void update_block(float* __restrict master, const Gradient* __restrict gradient,
                  std::uint8_t* __restrict code1, std::uint8_t* __restrict code2, float* scale1,
                  float* scale2, std::int64_t count, const AdamConstants& constants,
                  RandomPlace place) {
  float moment1[kQuantBlock], root2[kQuantBlock];
  const float before1 = *scale1, before2 = *scale2;
  std::uint32_t largest1 = 0, largest2 = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float root = decode_unsigned(code2[i], before2);
    const AdamState old{master[i], decode_signed(code1[i], before1), root * root};
    const AdamState next = adamw_body<decoupled>(old, to_float(gradient[i]), constants);
    master[i] = next.master;
    moment1[i] = next.moment1;
    root2[i] = sqrtf(next.moment2);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    largest1 = larger(largest1, moment1[i]);
    largest2 = larger(largest2, root2[i]);
  }
  const float after1 = float_of(largest1), after2 = float_of(largest2);
  for (std::int64_t i = 0; i < count; ++i) {
    code1[i] = encode_signed(moment1[i], after1);
    code2[i] = encode_unsigned(root2[i], after2, random_bits(place.key, place.first + i));
  }
  *scale1 = after1;
  *scale2 = after2;
}

}  // namespace

void adamw_bf16(const AdamBf16Arrays& arrays, std::int64_t begin, std::int64_t count,
                const AdamConstants& constants, bool decoupled, const RandomPlace& place) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    const auto chunk = decoupled ? update_bf16<true, Gradient> : update_bf16<false, Gradient>;
    chunk(arrays.master + begin, static_cast<const Gradient*>(arrays.gradient) + begin,
          arrays.moment1 + begin, arrays.moment2 + begin, count, constants, place);
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

void adamw_8bit(const Adam8BitArrays& arrays, std::int64_t begin, std::int64_t count,
                const AdamConstants& constants, bool decoupled, const RandomPlace& place) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    const auto block = decoupled ? update_block<true, Gradient> : update_block<false, Gradient>;
    for (std::int64_t offset = 0; offset < count; offset += kQuantBlock) {
      const std::int64_t at = begin + offset, left = count - offset;
      block(arrays.master + at, static_cast<const Gradient*>(arrays.gradient) + at,
            arrays.code1 + at, arrays.code2 + at, arrays.scale1 + at / kQuantBlock,
            arrays.scale2 + at / kQuantBlock, left < kQuantBlock ? left : kQuantBlock, constants,
            {place.key, place.first + offset});
    }
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace poise::kernels::cpu::POISE_ISA
