// Weighted accumulation, then the norm by another read: the CPU loops fold the two.
#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void accumulate(const Launch& launch, Accumulate mode, float* accumulator, DType gradient_dtype,
                const void* gradient, std::int64_t numel, float weight, double* sum_of_squares) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float old = mode == Accumulate::write ? 0.0f : accumulator[i];
    accumulator[i] = accumulate_body(old, load(gradient_dtype, gradient, i), weight);
  }
  if (sum_of_squares != nullptr) {
    const Piece whole{0, numel};
    reference::squared_norms(launch, DType::f32, accumulator, &whole, 1, sum_of_squares);
  }
}

}  // namespace poise::kernels::reference
