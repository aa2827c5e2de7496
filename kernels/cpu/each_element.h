// The loop of optimizers that keep one number of an element besides its master, over one chunk.
// Included by files compiled per instruction set only.
#pragma once

#include "kernels/cpu/copy_low.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <class State, bool with_momentum, class Gradient, class Body>
void update_chunk(float* __restrict master, const Gradient* __restrict gradient,
                  float* __restrict momentum, std::int64_t count, Body body) {
  for (std::int64_t i = 0; i < count; ++i) {
    const State old{master[i], with_momentum ? momentum[i] : 0.0f};
    const State next = body(old, to_float(gradient[i]));
    master[i] = next.master;
    if (with_momentum) momentum[i] = next.momentum;
  }
}

// body(State, gradient) -> State for elements [begin, begin + count); a momentum that is not kept
// is 0.
template <class State, class Arrays, class Body>
void each_element(const Arrays& arrays, std::int64_t begin, std::int64_t count, Body body) {
  float* master = arrays.master + begin;
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    const auto* gradient = static_cast<const Gradient*>(arrays.gradient) + begin;
    if (arrays.momentum != nullptr) {
      update_chunk<State, true>(master, gradient, arrays.momentum + begin, count, body);
    } else {
      update_chunk<State, false>(master, gradient, static_cast<float*>(nullptr), count, body);
    }
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace
}  // namespace poise::kernels::cpu::POISE_ISA
