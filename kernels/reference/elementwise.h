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

}  // namespace poise::kernels::reference
