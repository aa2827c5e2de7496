// SGD, element by element.
#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void sgd(const Launch&, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  each_element<SgdState>(
      arrays, segments, num_segments,
      [&](const SgdSegment& s) { return sgd_constants(settings, s.lr, s.weight_decay); }, sgd_body);
}

}  // namespace poise::kernels::reference
