// AdamW and Adam over one flat in one pass: gradient scaling, moments, master, low-precision copy.
// (Kingma and Ba 2014, arXiv:1412.6980; Loshchilov and Hutter 2017, arXiv:1711.05101.)
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/blend.h"
#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

// Arrays of one flat; all of the same length.
struct AdamArrays {
  float* master = nullptr;
  void* low = nullptr;  // 16-bit copy of master; null: none
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
};

// Elements [begin, end) with their settings. Elements in no segment are not touched.
struct AdamSegment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double lr = 0;
  double weight_decay = 0;
};

struct AdamSettings {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  std::int64_t step = 1;  // counts updates from 1, for the bias corrections
  bool decoupled = true;  // AdamW; false: weight decay is added to the gradient (Adam)
  double factor = 1;      // multiplies the gradient
};

POISE_API void adamw(const Launch& launch, const AdamArrays& arrays, const AdamSegment* segments,
                     std::int64_t num_segments, const AdamSettings& settings);

// What the body needs, rounded once from double.
struct AdamConstants {
  float factor;
  float beta1, rest1;  // rest = 1 - beta
  float beta2, rest2;
  float root_correction;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
  float keep;       // AdamW: 1 - lr x weight decay
  float l2;         // Adam: weight decay
};

AdamConstants adam_constants(const AdamSettings& settings, double lr, double weight_decay);

struct AdamState {
  float master;
  float moment1;
  float moment2;
};

template <bool decoupled>
POISE_BODY AdamState adamw_body(AdamState old, float gradient, const AdamConstants& constants) {
  float scaled = gradient * constants.factor;
  if (!decoupled) scaled += constants.l2 * old.master;
  AdamState next;
  next.moment1 = blend(old.moment1, scaled, constants.beta1, constants.rest1);
  next.moment2 = blend(old.moment2, scaled * scaled, constants.beta2, constants.rest2);
  const float deviation = sqrtf(next.moment2) * constants.root_correction + constants.eps;
  const float kept = decoupled ? old.master * constants.keep : old.master;
  next.master = kept - constants.step_size * (next.moment1 / deviation);
  return next;
}

}  // namespace poise::kernels
