// SGD, element by element.
#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void sgd(const Launch&, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const SgdConstants constants =
        sgd_constants(settings, segments[s].lr, segments[s].weight_decay);
    for (std::int64_t i = segments[s].begin; i < segments[s].end; ++i) {
      const float momentum = arrays.momentum != nullptr ? arrays.momentum[i] : 0.0f;
      const float gradient = load(arrays.gradient_dtype, arrays.gradient, i);
      const SgdState next = sgd_body({arrays.master[i], momentum}, gradient, constants);
      arrays.master[i] = next.master;
      if (arrays.momentum != nullptr) arrays.momentum[i] = next.momentum;
      if (arrays.low != nullptr) store(arrays.low_dtype, arrays.low, i, next.master);
    }
  }
}

}  // namespace poise::kernels::reference
