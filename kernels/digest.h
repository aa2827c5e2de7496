// XXH3, the 64-bit xxHash (Y. Collet, https://xxhash.com, seed 0) by its own library, compiled for
// each instruction set: several times faster than a disk, and every flipped bit shows. Against
// bytes that changed behind our back, not against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>

#include "poise/export.h"

namespace poise::kernels {

// Between the pieces of what is read.
struct alignas(64) DigestState {
  unsigned char bytes[576];
};

// Of `size` bytes at once.
POISE_API std::uint64_t digest(const void* data, std::size_t size);

POISE_API void digest_begin(DigestState& state);
POISE_API void digest_update(DigestState& state, const void* data, std::size_t size);
POISE_API std::uint64_t digest_value(const DigestState& state);

}  // namespace poise::kernels
