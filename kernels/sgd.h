// Stochastic gradient descent with momentum over one flat in one pass, as torch.optim.SGD: weight
// decay is added to the gradient, the first update's momentum is the gradient itself.
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

struct SgdArrays {
  float* master = nullptr;
  void* low = nullptr;  // 16-bit copy of master; null: none
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  float* momentum = nullptr;  // zeros before the first update; null: none is kept
};

struct SgdSegment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double lr = 0;
  double weight_decay = 0;
};

struct SgdSettings {
  double momentum = 0;  // not 0 only where the arrays hold one
  bool nesterov = false;
  double factor = 1;  // multiplies the gradient
};

POISE_API void sgd(const Launch& launch, const SgdArrays& arrays, const SgdSegment* segments,
                   std::int64_t num_segments, const SgdSettings& settings);

// What the body needs, rounded once from double.
struct SgdConstants {
  float factor;
  float weight_decay;
  float momentum;
  float lr;
  bool nesterov;
};

SgdConstants sgd_constants(const SgdSettings& settings, double lr, double weight_decay);

struct SgdState {
  float master;
  float momentum;
};

// From a momentum of zero, momentum x 0 + g is g: the first update needs no case of its own.
POISE_BODY SgdState sgd_body(SgdState old, float gradient, const SgdConstants& constants) {
  const float scaled = gradient * constants.factor + constants.weight_decay * old.master;
  SgdState next;
  next.momentum = constants.momentum * old.momentum + scaled;
  const float ahead = scaled + constants.momentum * next.momentum;
  next.master = old.master - constants.lr * (constants.nesterov ? ahead : next.momentum);
  return next;
}

}  // namespace poise::kernels
