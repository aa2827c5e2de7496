// Lion, element by element.
#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void lion(const Launch&, const LionArrays& arrays, const LionSegment* segments,
          std::int64_t num_segments, const LionSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const LionConstants constants =
        lion_constants(settings, segments[s].lr, segments[s].weight_decay);
    for (std::int64_t i = segments[s].begin; i < segments[s].end; ++i) {
      const LionState old{arrays.master[i], arrays.momentum[i]};
      const LionState next =
          lion_body(old, load(arrays.gradient_dtype, arrays.gradient, i), constants);
      arrays.master[i] = next.master;
      arrays.momentum[i] = next.momentum;
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

}  // namespace poise::kernels::reference
