// Writing the low-precision copy: its type is uniform over a launch, so a branch costs nothing.
#pragma once

#include "kernels/cast.h"

namespace poise::kernels::cuda {

static __device__ __forceinline__ void store_low(void* low, DType dtype, std::int64_t index,
                                                 float value) {
  if (low == nullptr) return;
  if (dtype == DType::bf16) {
    static_cast<Bf16*>(low)[index] = from_float<Bf16>(value);
  } else {
    static_cast<F16*>(low)[index] = from_float<F16>(value);
  }
}

}  // namespace poise::kernels::cuda
