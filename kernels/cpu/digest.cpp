// XXH3 by the library's header: its loops are taken for the instruction set this is compiled for.
#include "kernels/digest.h"

// Its loops of 512 bits are no faster than memory either, and make g++ 12 warn of its own headers.
#if defined(__AVX512F__)
#define XXH_VECTOR XXH_AVX2
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

static_assert(sizeof(DigestState) >= sizeof(XXH3_state_t));
static_assert(alignof(DigestState) >= alignof(XXH3_state_t));

XXH3_state_t* state_in(DigestState& state) { return reinterpret_cast<XXH3_state_t*>(&state); }

}  // namespace

std::uint64_t digest(const void* data, std::size_t size) { return XXH3_64bits(data, size); }

void digest_begin(DigestState& state) {
  XXH3_INITSTATE(state_in(state));
  XXH3_64bits_reset(state_in(state));
}

void digest_update(DigestState& state, const void* data, std::size_t size) {
  XXH3_64bits_update(state_in(state), data, size);
}

std::uint64_t digest_value(const DigestState& state) {
  return XXH3_64bits_digest(reinterpret_cast<const XXH3_state_t*>(&state));
}

}  // namespace poise::kernels::cpu::POISE_ISA
