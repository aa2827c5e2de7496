// LAMB: Adam's direction with weight decay, its length set by the ratio of the norms of weights and
// direction of the whole parameter. (You et al. 2019, arXiv:1904.00962, algorithm 2.)
#pragma once

#include <cstdint>

#include "kernels/adamw.h"

namespace poise::kernels {

// The moments' arrays are Adam's. `trust`: the ratio; it multiplies lr.
struct LambSegment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double lr = 0;
  double weight_decay = 0;
  double trust = 1;
};

// squares[s]: the square sum of the direction that lamb() would take in segment s, as
// squared_norms() sums. Nothing else is written. Host memory for the CPU back ends, device memory
// for CUDA.
POISE_API void lamb_squares(const Launch& launch, const AdamArrays& arrays,
                            const LambSegment* segments, std::int64_t num_segments,
                            const AdamSettings& settings, double* squares);

POISE_API void lamb(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
                    std::int64_t num_segments, const AdamSettings& settings);

// What the bodies need, rounded once from double.
struct LambConstants {
  float factor;
  float beta1, rest1;
  float beta2, rest2;
  float correction1;       // 1 / (1 - beta1^step)
  float root_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float decay;
  float step_size;  // lr x trust
};

LambConstants lamb_constants(const AdamSettings& settings, const LambSegment& segment);

struct LambStep {
  float direction;
  float moment1;
  float moment2;
};

POISE_BODY LambStep lamb_step(const AdamState& old, float gradient, const LambConstants& c) {
  const float scaled = gradient * c.factor;
  LambStep step;
  step.moment1 = blend(old.moment1, scaled, c.beta1, c.rest1);
  step.moment2 = blend(old.moment2, scaled * scaled, c.beta2, c.rest2);
  const float deviation = sqrtf(step.moment2) * c.root_correction2 + c.eps;
  step.direction = (step.moment1 * c.correction1) / deviation + c.decay * old.master;
  return step;
}

POISE_BODY AdamState lamb_body(const AdamState& old, float gradient, const LambConstants& c) {
  const LambStep step = lamb_step(old, gradient, c);
  return {old.master - c.step_size * step.direction, step.moment1, step.moment2};
}

}  // namespace poise::kernels
