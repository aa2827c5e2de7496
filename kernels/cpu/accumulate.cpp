// Weighted accumulation of one chunk, optionally with the square sum of what was written.
#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <bool add, class Element>
double accumulate_chunk(float* __restrict accumulator, const Element* __restrict gradient,
                        std::int64_t count, float weight) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float old = add ? accumulator[i] : 0.0f;
    accumulator[i] = accumulate_body(old, to_float(gradient[i]), weight);
  }
  return 0;
}

template <bool add, class Element>
double accumulate_norm_chunk(float* __restrict accumulator, const Element* __restrict gradient,
                             std::int64_t count, float weight) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  const auto one = [&](std::int64_t index, int lane) __attribute__((always_inline)) {
    const float old = add ? accumulator[index] : 0.0f;
    const float next = accumulate_body(old, to_float(gradient[index]), weight);
    accumulator[index] = next;
    lanes[lane] += square_body(next);
  };
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) one(i + lane, lane);
  }
  for (int lane = 0; i < count; ++i, ++lane) one(i, lane);
  return join_lanes(lanes);
}

}  // namespace

double accumulate(Accumulate mode, float* accumulator, DType gradient_dtype, const void* gradient,
                  std::int64_t begin, std::int64_t count, float weight, bool with_norm) {
  double sum = 0;
  with_element(gradient_dtype, [&](auto element) {
    using Element = decltype(element);
    const auto chunk =
        mode == Accumulate::add
            ? (with_norm ? accumulate_norm_chunk<true, Element> : accumulate_chunk<true, Element>)
            : (with_norm ? accumulate_norm_chunk<false, Element>
                         : accumulate_chunk<false, Element>);
    sum = chunk(accumulator + begin, static_cast<const Element*>(gradient) + begin, count, weight);
  });
  return sum;
}

}  // namespace poise::kernels::cpu::POISE_ISA
