// LARS, element by element.
#include "kernels/backends.h"
#include "kernels/reference/elementwise.h"

namespace poise::kernels::reference {

void lars(const Launch&, const LarsArrays& arrays, const LarsSegment* segments,
          std::int64_t num_segments, const LarsSettings& settings) {
  each_element<LarsState>(
      arrays, segments, num_segments,
      [&](const LarsSegment& s) { return lars_constants(settings, s.lr, s.weight_decay); },
      lars_body);
}

}  // namespace poise::kernels::reference
