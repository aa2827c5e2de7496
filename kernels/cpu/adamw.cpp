// AdamW and Adam over one chunk.
#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

struct NoCopy {};
POISE_BODY void store(NoCopy*, std::int64_t, float) {}
template <class Low>
POISE_BODY void store(Low* low, std::int64_t index, float value) {
  low[index] = from_float<Low>(value);
}

template <bool decoupled, class Gradient, class Low>
void update_chunk(float* __restrict master, Low* __restrict low,
                  const Gradient* __restrict gradient, float* __restrict moment1,
                  float* __restrict moment2, std::int64_t count, AdamConstants constants) {
  for (std::int64_t i = 0; i < count; ++i) {
    const AdamState old{master[i], moment1[i], moment2[i]};
    const AdamState next = adamw_body<decoupled>(old, to_float(gradient[i]), constants);
    master[i] = next.master;
    moment1[i] = next.moment1;
    moment2[i] = next.moment2;
    store(low, i, next.master);
  }
}

template <class Gradient, class Low>
void update(const AdamArrays& arrays, Low* low, std::int64_t begin, std::int64_t count,
            const AdamConstants& constants, bool decoupled) {
  const auto chunk =
      decoupled ? update_chunk<true, Gradient, Low> : update_chunk<false, Gradient, Low>;
  chunk(arrays.master + begin, low, static_cast<const Gradient*>(arrays.gradient) + begin,
        arrays.moment1 + begin, arrays.moment2 + begin, count, constants);
}

}  // namespace

void adamw(const AdamArrays& arrays, std::int64_t begin, std::int64_t count,
           const AdamConstants& constants, bool decoupled) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    if (arrays.low == nullptr) {
      NoCopy none;
      update<Gradient>(arrays, &none, begin, count, constants, decoupled);
    } else if (arrays.low_dtype == DType::bf16) {
      update<Gradient>(arrays, static_cast<Bf16*>(arrays.low) + begin, begin, count, constants,
                       decoupled);
    } else {
      update<Gradient>(arrays, static_cast<F16*>(arrays.low) + begin, begin, count, constants,
                       decoupled);
    }
  });
}

}  // namespace poise::kernels::cpu::POISE_ISA
