// What the files compiled per instruction set share: the declarations of their own copy.
#pragma once

#include "kernels/cast.h"
#include "kernels/cpu/loops.h"

#ifndef POISE_ISA
#error "compiled through poise_isa_sources() only"
#endif

namespace poise::kernels::cpu::POISE_ISA {

double squared_norm(DType, const void*, std::int64_t begin, std::int64_t count);
double accumulate(Accumulate, float*, DType, const void*, std::int64_t begin, std::int64_t count,
                  float weight, bool with_norm);
void adamw(const AdamArrays&, std::int64_t begin, std::int64_t count, const AdamConstants&,
           bool decoupled);
void adamw_bf16(const AdamBf16Arrays&, std::int64_t begin, std::int64_t count, const AdamConstants&,
                bool decoupled, const RandomPlace&);
void adamw_8bit(const Adam8BitArrays&, std::int64_t begin, std::int64_t count, const AdamConstants&,
                bool decoupled, const RandomPlace&);
void factor_sum(const FactoredArrays&, const FactorLayout&, std::int64_t begin, std::int64_t place,
                std::int64_t count, const FactoredConstants&, double* rows, double* columns);
double factored_square(const FactoredArrays&, const FactorLayout&, std::int64_t begin,
                       std::int64_t place, std::int64_t count, const FactoredConstants&);
void adafactor(const FactoredArrays&, const FactorLayout&, std::int64_t begin, std::int64_t place,
               std::int64_t count, const FactoredConstants&);
double lamb_square(const AdamArrays&, std::int64_t begin, std::int64_t count, const LambConstants&);
void lamb(const AdamArrays&, std::int64_t begin, std::int64_t count, const LambConstants&);
void lars(const LarsArrays&, std::int64_t begin, std::int64_t count, const LarsConstants&);
void lion(const LionArrays&, std::int64_t begin, std::int64_t count, const LionConstants&);
void lion_8bit(const Lion8BitArrays&, std::int64_t begin, std::int64_t count, const LionConstants&,
               const RandomPlace&);
void sgd(const SgdArrays&, std::int64_t begin, std::int64_t count, const SgdConstants&);
void pack(DType, DType, const void*, void*, std::int64_t begin, std::int64_t count, float scale);
std::uint64_t digest(const void* data, std::size_t size);
void digest_begin(DigestState&);
void digest_update(DigestState&, const void* data, std::size_t size);
std::uint64_t digest_value(const DigestState&);
std::uint32_t stream_read(const float*, std::int64_t begin, std::int64_t count);
void stream_update(const AdamArrays&, std::int64_t begin, std::int64_t count);

}  // namespace poise::kernels::cpu::POISE_ISA
