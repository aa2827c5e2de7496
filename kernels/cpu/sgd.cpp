// SGD over one chunk.
#include "kernels/cpu/each_element.h"

namespace poise::kernels::cpu::POISE_ISA {

void sgd(const SgdArrays& arrays, std::int64_t begin, std::int64_t count,
         const SgdConstants& constants) {
  each_element<SgdState>(arrays, begin, count, [constants](SgdState old, float gradient) {
    return sgd_body(old, gradient, constants);
  });
}

}  // namespace poise::kernels::cpu::POISE_ISA
