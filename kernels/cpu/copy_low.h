// The low-precision copy of a chunk of masters that a loop has just written: it is still in the
// nearest cache. Included by files compiled per instruction set only.
#pragma once

#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <class Low>
void copy_chunk(Low* __restrict low, const float* __restrict master, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) low[i] = from_float<Low>(master[i]);
}

// Elements [begin, begin + count) of both; `low` may be null.
inline void copy_low(void* low, DType dtype, const float* master, std::int64_t begin,
                     std::int64_t count) {
  if (low == nullptr) return;
  if (dtype == DType::bf16) {
    copy_chunk(static_cast<Bf16*>(low) + begin, master + begin, count);
  } else {
    copy_chunk(static_cast<F16*>(low) + begin, master + begin, count);
  }
}

}  // namespace
}  // namespace poise::kernels::cpu::POISE_ISA
