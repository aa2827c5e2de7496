// Numbers in 8 bits, relative to the largest magnitude of their block: seven decades from 1e-7 to 1
// with 1, 2, 4, ... 64 levels, evenly spaced (twice as many where there is no sign), so that both
// large and small ones keep some digits. After the dynamic tree quantization of Dettmers et al.
// 2021 (arXiv:2110.02861), with levels at the ends of decades instead of their cells' middles: the
// largest magnitude of a block is exact, and zero is zero.
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/cast.h"

namespace poise::kernels {

inline constexpr std::int64_t kQuantBlock = 256;  // elements with one scale

// Level codes of magnitudes in [0, 1]: decade d begins at 10^(d - 7) (the lowest one at 0) and has
// 2^(d + shift) levels above that. shift 0: codes up to 127; shift 1: up to 254.
struct Decade {
  float begin;
  float step;         // between two levels
  std::int32_t code;  // of `begin`
};

template <int shift>
POISE_BODY Decade decade(int d) {
  constexpr float begins[] = {0.0f, 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  const std::int32_t levels = 1 << (d + shift);
  return {begins[d], (begins[d + 1] - begins[d]) / static_cast<float>(levels),
          levels - (1 << shift)};
}

template <int shift>
POISE_BODY Decade decade_of(float magnitude) {
  Decade found = decade<shift>(0);
  for (int d = 1; d < 7; ++d) {
    const Decade next = decade<shift>(d);
    const bool above = magnitude > next.begin;
    found.begin = above ? next.begin : found.begin;
    found.step = above ? next.step : found.step;
    found.code = above ? next.code : found.code;
  }
  return found;
}

// `rounding` in [0, 1): 0.5 to the nearest level; a random number to either neighbour, right on
// average.
template <int shift>
POISE_BODY std::int32_t encode(float magnitude, float rounding) {
  constexpr std::int32_t top = (128 << shift) - (1 << shift);
  const float inside = magnitude < 1.0f ? magnitude : 1.0f;  // a NaN too
  const Decade in = decade_of<shift>(inside);
  const auto level = static_cast<std::int32_t>((inside - in.begin) / in.step + rounding);
  const std::int32_t code = in.code + level;
  return code < top ? code : top;
}

template <int shift>
POISE_BODY float decode(std::int32_t code) {
  Decade found = decade<shift>(0);
  for (int d = 1; d < 7; ++d) {
    const Decade next = decade<shift>(d);
    const bool above = code > next.code;
    found.begin = above ? next.begin : found.begin;
    found.step = above ? next.step : found.step;
    found.code = above ? next.code : found.code;
  }
  return found.begin + static_cast<float>(code - found.code) * found.step;
}

// Of 24 of the random `bits`.
POISE_BODY float random_rounding(std::uint32_t bits) {
  return static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
}

// A number with a sign, to the nearest level unless told otherwise. `scale`: the largest magnitude
// of its block.
POISE_BODY std::uint8_t encode_signed(float value, float scale, float rounding = 0.5f) {
  const float magnitude = value < 0.0f ? -value : value;
  const std::int32_t code = encode<0>(scale > 0.0f ? magnitude / scale : 0.0f, rounding);
  return static_cast<std::uint8_t>(value < 0.0f ? code | 128 : code);
}

POISE_BODY float decode_signed(std::uint8_t code, float scale) {
  const float magnitude = decode<0>(code & 127) * scale;
  return code & 128 ? -magnitude : magnitude;
}

// A number without one, to either neighbour as the random `bits` say; what is not zero does
// not become zero.
POISE_BODY std::uint8_t encode_unsigned(float value, float scale, std::uint32_t bits) {
  const std::int32_t code = encode<1>(scale > 0.0f ? value / scale : 0.0f, random_rounding(bits));
  return static_cast<std::uint8_t>(value > 0.0f && code == 0 ? 1 : code);
}

POISE_BODY float decode_unsigned(std::uint8_t code, float scale) { return decode<1>(code) * scale; }

}  // namespace poise::kernels
