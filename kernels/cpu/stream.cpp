// The traffic of the optimizer stage without its arithmetic, over one chunk.
#include "kernels/stream.h"
#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {

std::uint32_t stream_read(const float* array, std::int64_t begin, std::int64_t count) {
  const float* data = array + begin;
  std::uint32_t bits = 0;
  for (std::int64_t i = 0; i < count; ++i) bits ^= bits_of(data[i]);
  return bits;
}

void stream_update(const AdamArrays& arrays, std::int64_t begin, std::int64_t count) {
  float* __restrict master = arrays.master + begin;
  float* __restrict moment1 = arrays.moment1 + begin;
  float* __restrict moment2 = arrays.moment2 + begin;
  std::uint16_t* __restrict low = static_cast<std::uint16_t*>(arrays.low) + begin;
  const float* __restrict gradient = static_cast<const float*>(arrays.gradient) + begin;
  for (std::int64_t i = 0; i < count; ++i) {
    const AdamState next = stream_body({master[i], moment1[i], moment2[i]}, gradient[i]);
    master[i] = next.master;
    moment1[i] = next.moment1;
    moment2[i] = next.moment2;
    low[i] = static_cast<std::uint16_t>(bits_of(next.master) >> 16);
  }
}

}  // namespace poise::kernels::cpu::POISE_ISA
