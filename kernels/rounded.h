// What optimizers share whose moments are rounded at random, or lie in blocks with one scale each.
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/cast.h"
#include "kernels/random.h"

namespace poise::kernels {

struct RoundedSegment {
  std::int64_t begin = 0;  // 8 bits: a multiple of kQuantBlock
  std::int64_t end = 0;
  double lr = 0;
  double weight_decay = 0;
  std::int64_t first = 0;  // place of element `begin` in its parameter
  std::uint64_t key = 0;   // of the parameter's random bits in this update
};

// Where a chunk of a segment is in its parameter.
struct RandomPlace {
  RandomKey key;
  std::int64_t first;
};

// The larger of two magnitudes, as bits: they compare as the numbers do, and vectorise.
POISE_BODY std::uint32_t larger(std::uint32_t largest, float value) {
  const std::uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
  return bits > largest ? bits : largest;
}

}  // namespace poise::kernels
