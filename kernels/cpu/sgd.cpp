// SGD over one chunk.
#include "kernels/cpu/isa_loops.h"

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

template <class Low>
void copy_chunk(Low* __restrict low, const float* __restrict master, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) low[i] = from_float<Low>(master[i]);
}

}  // namespace

// The copy is a second loop: a chunk of master is still in the nearest cache.
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
  if (arrays.low == nullptr) return;
  if (arrays.low_dtype == DType::bf16) {
    copy_chunk(static_cast<Bf16*>(arrays.low) + begin, master, count);
  } else {
    copy_chunk(static_cast<F16*>(arrays.low) + begin, master, count);
  }
}

}  // namespace poise::kernels::cpu::POISE_ISA
