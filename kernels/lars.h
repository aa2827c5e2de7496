// LARS: momentum over gradients whose length is set by the ratio of the norms of weights and
// gradient of the whole parameter. (You et al. 2017, arXiv:1708.03888, algorithm 1: the learning
// rate is inside of the momentum.)
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

struct LarsArrays {
  float* master = nullptr;
  void* low = nullptr;  // 16-bit copy of master; null: none
  DType low_dtype = DType::bf16;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;
  float* momentum = nullptr;
};

struct LarsSegment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double lr = 0;  // times the parameter's own rate
  double weight_decay = 0;
};

struct LarsSettings {
  double momentum = 0.9;
  double factor = 1;  // multiplies the gradient
};

POISE_API void lars(const Launch& launch, const LarsArrays& arrays, const LarsSegment* segments,
                    std::int64_t num_segments, const LarsSettings& settings);

// What the body needs, rounded once from double.
struct LarsConstants {
  float factor;
  float momentum;
  float lr;
  float decay;
};

LarsConstants lars_constants(const LarsSettings& settings, double lr, double weight_decay);

struct LarsState {
  float master;
  float momentum;
};

POISE_BODY LarsState lars_body(LarsState old, float gradient, const LarsConstants& c) {
  const float decayed = gradient * c.factor + c.decay * old.master;
  LarsState next;
  next.momentum = c.momentum * old.momentum + c.lr * decayed;
  next.master = old.master - next.momentum;
  return next;
}

}  // namespace poise::kernels
