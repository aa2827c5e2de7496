// AdamW and Adam whose moments lie in fewer bits. The update is computed in fp32 as by adamw();
// what is kept of the moments is then rounded, by random bits that depend on the update and on the
// element's place in its parameter alone.
//
// bf16: both moments rounded stochastically. A second moment changes by less than half a bf16 step
// per update, so that rounding to nearest would leave it where it is.
//
// 8 bits: blocks of kQuantBlock elements with one fp32 scale each (kernels/quantize.h): the first
// moment with its sign, to the nearest level, and the root of the second one, stochastically.
// (Dettmers et al. 2021, arXiv:2110.02861.)
#pragma once

#include <cstdint>

#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/quantize.h"
#include "kernels/random.h"

namespace poise::kernels {

struct AdamBf16Arrays {
  float* master = nullptr;
  void* low = nullptr;  // 16-bit copy of master; null: none
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  Bf16* moment1 = nullptr;
  Bf16* moment2 = nullptr;
};

struct Adam8BitArrays {
  float* master = nullptr;
  void* low = nullptr;
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  std::uint8_t* code1 = nullptr;  // of the first moment
  float* scale1 = nullptr;        // one for each kQuantBlock elements
  std::uint8_t* code2 = nullptr;  // of the root of the second moment
  float* scale2 = nullptr;
};

struct AdamLowSegment {
  std::int64_t begin = 0;  // 8 bits: a multiple of kQuantBlock
  std::int64_t end = 0;
  double lr = 0;
  double weight_decay = 0;
  std::int64_t first = 0;  // place of element `begin` in its parameter
  std::uint64_t key = 0;   // of the parameter's random bits in this update
};

POISE_API void adamw_bf16(const Launch& launch, const AdamBf16Arrays& arrays,
                          const AdamLowSegment* segments, std::int64_t num_segments,
                          const AdamSettings& settings);
POISE_API void adamw_8bit(const Launch& launch, const Adam8BitArrays& arrays,
                          const AdamLowSegment* segments, std::int64_t num_segments,
                          const AdamSettings& settings);

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
