// SGD over one chunk.
#include "kernels/cpu/copy_low.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <bool with_momentum, class Gradient>
void update_chunk(float* __restrict master, const Gradient* __restrict gradient,
                  float* __restrict momentum, std::int64_t count, SgdConstants constants) {
  for (std::int64_t i = 0; i < count; ++i) {
    const SgdState old{master[i], with_momentum ? momentum[i] : 0.0f};
    const SgdState next = sgd_body(old, to_float(gradient[i]), constants);
    master[i] = next.master;
    if (with_momentum) momentum[i] = next.momentum;
  }
}

}  // namespace

void sgd(const SgdArrays& arrays, std::int64_t begin, std::int64_t count,
         const SgdConstants& constants) {
  float* master = arrays.master + begin;
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    const auto* gradient = static_cast<const Gradient*>(arrays.gradient) + begin;
    if (arrays.momentum != nullptr) {
      update_chunk<true>(master, gradient, arrays.momentum + begin, count, constants);
    } else {
      update_chunk<false>(master, gradient, static_cast<float*>(nullptr), count, constants);
    }
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace poise::kernels::cpu::POISE_ISA
