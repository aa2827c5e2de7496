// LAMB over one chunk: the square sum of its direction, and the update.
#include "kernels/lamb.h"

#include "kernels/cpu/copy_low.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <class Gradient>
double sum_chunk(const float* __restrict master, const Gradient* __restrict gradient,
                 const float* __restrict moment1, const float* __restrict moment2,
                 std::int64_t count, LambConstants constants) {
  const auto square_at = [&](std::int64_t i) {
    const AdamState old{master[i], moment1[i], moment2[i]};
    return square_body(lamb_step(old, to_float(gradient[i]), constants).direction);
  };
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += square_at(i + lane);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += square_at(i);
  return join_lanes(lanes);
}

template <class Gradient>
void update_chunk(float* __restrict master, const Gradient* __restrict gradient,
                  float* __restrict moment1, float* __restrict moment2, std::int64_t count,
                  LambConstants constants) {
  for (std::int64_t i = 0; i < count; ++i) {
    const AdamState old{master[i], moment1[i], moment2[i]};
    const AdamState next = lamb_body(old, to_float(gradient[i]), constants);
    master[i] = next.master;
    moment1[i] = next.moment1;
    moment2[i] = next.moment2;
  }
}

}  // namespace

double lamb_square(const AdamArrays& arrays, std::int64_t begin, std::int64_t count,
                   const LambConstants& constants) {
  double sum = 0;
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    sum = sum_chunk(arrays.master + begin, static_cast<const Gradient*>(arrays.gradient) + begin,
                    arrays.moment1 + begin, arrays.moment2 + begin, count, constants);
  });
  return sum;
}

void lamb(const AdamArrays& arrays, std::int64_t begin, std::int64_t count,
          const LambConstants& constants) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    update_chunk(arrays.master + begin, static_cast<const Gradient*>(arrays.gradient) + begin,
                 arrays.moment1 + begin, arrays.moment2 + begin, count, constants);
  });
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace poise::kernels::cpu::POISE_ISA
