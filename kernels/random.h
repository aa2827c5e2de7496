// Random bits that are a function of a key and a position alone: the same whatever the shard, the
// tile, the thread or the device that asks. The mixing is Wellons' "lowbias32" hash (public
// domain).
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/cast.h"

namespace poise::kernels {

struct RandomKey {
  std::uint32_t low;
  std::uint32_t high;
};

POISE_BODY RandomKey random_key(std::uint64_t key) {
  return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

POISE_BODY std::uint32_t mixed(std::uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

// 32 bits of element `index`.
POISE_BODY std::uint32_t random_bits(RandomKey key, std::int64_t index) {
  const auto position = static_cast<std::uint64_t>(index);
  const auto low = static_cast<std::uint32_t>(position);
  const auto high = static_cast<std::uint32_t>(position >> 32);
  return mixed(mixed(low ^ key.low) + (high ^ key.high));
}

// To one of the two neighbours in bf16, to the farther one as rarely as it is far: right on
// average. `bits`: 16 random ones. Infinities and NaNs stay what they are.
POISE_BODY Bf16 rounded_at_random(float value, std::uint32_t bits) {
  const std::uint32_t exact = bits_of(value);
  const bool finite = (exact & 0x7F800000u) != 0x7F800000u;
  const std::uint32_t rounded = (exact + (finite ? bits : 0u)) >> 16;
  const bool nan = (exact & 0x7FFFFFFFu) > 0x7F800000u;
  return Bf16{static_cast<std::uint16_t>(nan ? 0x7FC0u : rounded)};
}

}  // namespace poise::kernels
