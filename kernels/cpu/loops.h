// The CPU loops of one chunk or span, compiled once per instruction set. The files named in
// CMakeLists.txt's poise_isa_sources() are compiled several times with POISE_ISA set to the
// namespace that holds that copy.
#pragma once

#include <cstdint>

#include "kernels/accumulate.h"
#include "kernels/adafactor.h"
#include "kernels/adamw.h"
#include "kernels/adamw_low.h"
#include "kernels/digest.h"
#include "kernels/isa.h"
#include "kernels/lamb.h"
#include "kernels/lars.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/sgd.h"

namespace poise::kernels::cpu {

// The copies of one instruction set.
struct Loops {
  // The square sum of one chunk.
  double (*squared_norm)(DType, const void* base, std::int64_t begin, std::int64_t count);
  // One chunk; returns the square sum of the new accumulator where `with_norm`.
  double (*accumulate)(Accumulate, float* accumulator, DType, const void* gradient,
                       std::int64_t begin, std::int64_t count, float weight, bool with_norm);
  void (*adamw)(const AdamArrays&, std::int64_t begin, std::int64_t count, const AdamConstants&,
                bool decoupled);
  void (*adamw_bf16)(const AdamBf16Arrays&, std::int64_t begin, std::int64_t count,
                     const AdamConstants&, bool decoupled, const RandomPlace&);
  void (*adamw_8bit)(const Adam8BitArrays&, std::int64_t begin, std::int64_t count,
                     const AdamConstants&, bool decoupled, const RandomPlace&);
  // Adds one chunk's squares to those of its parameter's rows and columns.
  void (*factor_sum)(const FactoredArrays&, const FactorLayout&, std::int64_t begin,
                     std::int64_t place, std::int64_t count, const FactoredConstants&, double* rows,
                     double* columns);
  double (*factored_square)(const FactoredArrays&, const FactorLayout&, std::int64_t begin,
                            std::int64_t place, std::int64_t count, const FactoredConstants&);
  void (*adafactor)(const FactoredArrays&, const FactorLayout&, std::int64_t begin,
                    std::int64_t place, std::int64_t count, const FactoredConstants&);
  double (*lamb_square)(const AdamArrays&, std::int64_t begin, std::int64_t count,
                        const LambConstants&);
  void (*lamb)(const AdamArrays&, std::int64_t begin, std::int64_t count, const LambConstants&);
  void (*lars)(const LarsArrays&, std::int64_t begin, std::int64_t count, const LarsConstants&);
  void (*lion)(const LionArrays&, std::int64_t begin, std::int64_t count, const LionConstants&);
  void (*lion_8bit)(const Lion8BitArrays&, std::int64_t begin, std::int64_t count,
                    const LionConstants&, const RandomPlace&);
  void (*sgd)(const SgdArrays&, std::int64_t begin, std::int64_t count, const SgdConstants&);
  void (*pack)(DType source_dtype, DType target_dtype, const void* source, void* target,
               std::int64_t begin, std::int64_t count, float scale);
  std::uint64_t (*digest)(const void* data, std::size_t size);
  void (*digest_begin)(DigestState&);
  void (*digest_update)(DigestState&, const void* data, std::size_t size);
  std::uint64_t (*digest_value)(const DigestState&);
  std::uint32_t (*stream_read)(const float* array, std::int64_t begin, std::int64_t count);
  void (*stream_update)(const AdamArrays&, std::int64_t begin, std::int64_t count);
};

namespace baseline {
extern const Loops kLoops;
}
namespace avx2 {
extern const Loops kLoops;
}
namespace avx512 {
extern const Loops kLoops;
}

// Those of active_isa().
const Loops& loops();

}  // namespace poise::kernels::cpu
