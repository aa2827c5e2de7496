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
#include "kernels/rounded.h"

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

POISE_API void adamw_bf16(const Launch& launch, const AdamBf16Arrays& arrays,
                          const RoundedSegment* segments, std::int64_t num_segments,
                          const AdamSettings& settings);
POISE_API void adamw_8bit(const Launch& launch, const Adam8BitArrays& arrays,
                          const RoundedSegment* segments, std::int64_t num_segments,
                          const AdamSettings& settings);

}  // namespace poise::kernels
