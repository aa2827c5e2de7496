// LARS over one chunk.
#include "kernels/cpu/each_element.h"

namespace poise::kernels::cpu::POISE_ISA {

void lars(const LarsArrays& arrays, std::int64_t begin, std::int64_t count,
          const LarsConstants& constants) {
  each_element<LarsState>(arrays, begin, count, [constants](LarsState old, float gradient) {
    return lars_body(old, gradient, constants);
  });
}

}  // namespace poise::kernels::cpu::POISE_ISA
