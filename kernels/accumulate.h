// Adding a micro-batch's gradient, weighted, into the window's fp32 accumulator.
#pragma once

#include <cstdint>

#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

enum class Accumulate : std::uint8_t {
  write,  // the accumulator's old contents are not read
  add,
};

// accumulator[i] = (write ? 0 : accumulator[i]) + weight * float(gradient[i]). Where
// `sum_of_squares` is given it receives squared_norms() of the new accumulator as one piece, with
// the same bits and without another read (host memory for the CPU back ends, device memory for
// CUDA).
POISE_API void accumulate(const Launch& launch, Accumulate mode, float* accumulator,
                          DType gradient_dtype, const void* gradient, std::int64_t numel,
                          float weight, double* sum_of_squares);

// Adding 0 makes a written -0 a +0, as it would be after a fill with zeros.
POISE_BODY float accumulate_body(float accumulator, float gradient, float weight) {
  return accumulator + weight * gradient;
}

}  // namespace poise::kernels
