// LARS, element by element.
#include "kernels/lars.h"

#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void lars(const Launch&, const LarsArrays& arrays, const LarsSegment* segments,
          std::int64_t num_segments, const LarsSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const LarsConstants constants =
        lars_constants(settings, segments[s].lr, segments[s].weight_decay);
    for (std::int64_t i = segments[s].begin; i < segments[s].end; ++i) {
      const LarsState old{arrays.master[i], arrays.momentum[i]};
      const LarsState next =
          lars_body(old, load(arrays.gradient_dtype, arrays.gradient, i), constants);
      arrays.master[i] = next.master;
      arrays.momentum[i] = next.momentum;
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

}  // namespace poise::kernels::reference
