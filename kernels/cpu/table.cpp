// This instruction set's entry points.
#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {

const Loops kLoops = {
    squared_norm,    accumulate,  adamw,        adamw_bf16, adamw_8bit,   factor_sum,
    factored_square, adafactor,   lamb_square,  lamb,       lars,         lion,
    lion_8bit,       sgd,         pack,         digest,     digest_begin, digest_update,
    digest_value,    stream_read, stream_update};

}  // namespace poise::kernels::cpu::POISE_ISA
