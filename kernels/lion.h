// Lion over one flat in one pass: the sign of a blend of momentum and gradient is the step.
// (Chen et al. 2023, arXiv:2302.06675, algorithm 2.)
//
// 8 bits: the momentum in blocks of kQuantBlock elements with one fp32 scale each
// (kernels/quantize.h), rounded stochastically: it forgets a hundredth per update, less than half a
// level, so that rounding to nearest would leave it where it is.
#pragma once

#include <cstdint>

#include "kernels/blend.h"
#include "kernels/body.h"
#include "kernels/launch.h"
#include "kernels/quantize.h"
#include "kernels/rounded.h"
#include "poise/export.h"

namespace poise::kernels {

struct LionArrays {
  float* master = nullptr;
  void* low = nullptr;  // 16-bit copy of master; null: none
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  float* momentum = nullptr;
};

struct Lion8BitArrays {
  float* master = nullptr;
  void* low = nullptr;
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  std::uint8_t* code = nullptr;  // of the momentum
  float* scale = nullptr;        // one for each kQuantBlock elements
};

struct LionSegment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double lr = 0;
  double weight_decay = 0;
};

struct LionSettings {
  double beta1 = 0.9;   // of the blend whose sign is the step
  double beta2 = 0.99;  // of the momentum that stays
  double factor = 1;    // multiplies the gradient
};

POISE_API void lion(const Launch& launch, const LionArrays& arrays, const LionSegment* segments,
                    std::int64_t num_segments, const LionSettings& settings);

POISE_API void lion_8bit(const Launch& launch, const Lion8BitArrays& arrays,
                         const RoundedSegment* segments, std::int64_t num_segments,
                         const LionSettings& settings);

// What the body needs, rounded once from double; rest = 1 - beta.
struct LionConstants {
  float factor;
  float beta1, rest1;
  float beta2, rest2;
  float lr;
  float keep;  // 1 - lr x weight decay
};

LionConstants lion_constants(const LionSettings& settings, double lr, double weight_decay);

struct LionState {
  float master;
  float momentum;
};

// The sign of zero is zero, that of a NaN a NaN.
POISE_BODY float sign_of(float value) { return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : value; }

POISE_BODY LionState lion_body(LionState old, float gradient, const LionConstants& constants) {
  const float scaled = gradient * constants.factor;
  const float direction = sign_of(blend(old.momentum, scaled, constants.beta1, constants.rest1));
  LionState next;
  next.momentum = blend(old.momentum, scaled, constants.beta2, constants.rest2);
  next.master = old.master * constants.keep - constants.lr * direction;
  return next;
}

}  // namespace poise::kernels
