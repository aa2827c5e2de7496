// Reading and writing one element whose type is known only at run time: the reference loops are for
// reading, not for speed.
#pragma once

#include <cstdint>

#include "kernels/cast.h"

namespace poise::kernels::reference {

inline float load(DType dtype, const void* base, std::int64_t index) {
  float value = 0;
  with_element(dtype, [&](auto element) {
    value = to_float(static_cast<const decltype(element)*>(base)[index]);
  });
  return value;
}

inline void store(DType dtype, void* base, std::int64_t index, float value) {
  with_element(dtype, [&](auto element) {
    static_cast<decltype(element)*>(base)[index] = from_float<decltype(element)>(value);
  });
}

// body(State, gradient, constants) -> State for all elements of all segments, of optimizers that
// keep one number besides the master; one that is not kept is 0.
template <class State, class Arrays, class Segment, class ConstantsOf, class Body>
void each_element(const Arrays& arrays, const Segment* segments, std::int64_t num_segments,
                  ConstantsOf constants_of, Body body) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const auto constants = constants_of(segments[s]);
    for (std::int64_t i = segments[s].begin; i < segments[s].end; ++i) {
      const float momentum = arrays.momentum != nullptr ? arrays.momentum[i] : 0.0f;
      const float gradient = load(arrays.gradient_dtype, arrays.gradient, i);
      const State next = body(State{arrays.master[i], momentum}, gradient, constants);
      arrays.master[i] = next.master;
      if (arrays.momentum != nullptr) arrays.momentum[i] = next.momentum;
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

}  // namespace poise::kernels::reference
