// Sum of squares of one chunk, 16 lanes at a time.
#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <class Element>
double sum_chunk(const Element* __restrict data, std::int64_t count) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += square_body(to_float(data[i + lane]));
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += square_body(to_float(data[i]));
  return join_lanes(lanes);
}

}  // namespace

double squared_norm(DType dtype, const void* base, std::int64_t begin, std::int64_t count) {
  double sum = 0;
  with_element(dtype, [&](auto element) {
    sum = sum_chunk(static_cast<const decltype(element)*>(base) + begin, count);
  });
  return sum;
}

}  // namespace poise::kernels::cpu::POISE_ISA
