// AdamW and Adam, element by element.
#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void adamw(const Launch&, const AdamArrays& arrays, const AdamSegment* segments,
           std::int64_t num_segments, const AdamSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const AdamConstants constants =
        adam_constants(settings, segments[s].lr, segments[s].weight_decay);
    for (std::int64_t i = segments[s].begin; i < segments[s].end; ++i) {
      const AdamState old{arrays.master[i], arrays.moment1[i], arrays.moment2[i]};
      const float gradient = load(arrays.gradient_dtype, arrays.gradient, i);
      const AdamState next = settings.decoupled ? adamw_body<true>(old, gradient, constants)
                                                : adamw_body<false>(old, gradient, constants);
      arrays.master[i] = next.master;
      arrays.moment1[i] = next.moment1;
      arrays.moment2[i] = next.moment2;
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

}  // namespace poise::kernels::reference
