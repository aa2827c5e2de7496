// Lion over one chunk.
#include "kernels/cpu/copy_low.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <class Gradient>
void update_chunk(float* __restrict master, const Gradient* __restrict gradient,
                  float* __restrict momentum, std::int64_t count, LionConstants constants) {
  for (std::int64_t i = 0; i < count; ++i) {
    const LionState next = lion_body({master[i], momentum[i]}, to_float(gradient[i]), constants);
    master[i] = next.master;
    momentum[i] = next.momentum;
  }
}

}  // namespace

void lion(const LionArrays& arrays, std::int64_t begin, std::int64_t count,
          const LionConstants& constants) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    update_chunk(arrays.master + begin, static_cast<const Gradient*>(arrays.gradient) + begin,
                 arrays.momentum + begin, count, constants);
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace poise::kernels::cpu::POISE_ISA
