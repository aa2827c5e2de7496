// Element types of arrays and their exact conversions. Rounding to bf16 and fp16 is to nearest
// even, with the same bits as c10::BFloat16 and c10::Half; written with integers so that it
// vectorises on every instruction set and does not depend on the denormal mode.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/body.h"
#include "kernels/launch.h"

namespace poise::kernels {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

POISE_BODY std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

POISE_BODY float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

POISE_BODY float to_float(float value) { return value; }

POISE_BODY float to_float(Bf16 value) { return float_of(std::uint32_t{value.bits} << 16); }

POISE_BODY float to_float(F16 value) {
  const std::uint32_t sign = (std::uint32_t{value.bits} & 0x8000u) << 16;
  const std::uint32_t magnitude = std::uint32_t{value.bits} & 0x7FFFu;
  // A denormal m x 2^-24 is the mantissa of a float in [0.5, 1): subtract the 0.5.
  const std::uint32_t denormal = bits_of(float_of(0x3F000000u | magnitude) - 0.5f);
  const std::uint32_t rebias = magnitude >= 0x7C00u ? 224u << 23 : 112u << 23;
  const std::uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
  const std::uint32_t normal = ((magnitude << 13) + rebias) | quiet;
  return float_of(sign | (magnitude < 0x0400u ? denormal : normal));
}

// The second argument only says which type.
POISE_BODY float rounded_to(float value, float) { return value; }

POISE_BODY Bf16 rounded_to(float value, Bf16) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return Bf16{static_cast<std::uint16_t>(nan ? 0x7FC0u : rounded)};
}

POISE_BODY F16 rounded_to(float value, F16) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Adding 0.5 leaves the fp16 denormal, rounded by the hardware, in the low bits.
  const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const std::uint32_t rounded = magnitude + 0x0FFFu + ((magnitude >> 13) & 1u);
  const std::uint32_t normal = (rounded >> 13) - (112u << 10);
  std::uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // 65520 and above round to infinity
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  return F16{static_cast<std::uint16_t>(sign | half)};
}

template <class Element>
POISE_BODY Element from_float(float value) {
  return rounded_to(value, Element{});
}

// Calls `use` with a value of the C++ type of `dtype` (the value itself means nothing).
template <class Use>
static inline void with_element(DType dtype, Use use) {
  switch (dtype) {
    case DType::f32:
      return use(float{});
    case DType::bf16:
      return use(Bf16{});
    case DType::f16:
      return use(F16{});
  }
}

}  // namespace poise::kernels
