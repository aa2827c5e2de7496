// A fast 64-bit checksum of a block, against bytes that changed behind the store's back. Not
// against an adversary.
#pragma once

#include <cstdint>

namespace poise::offload {

// `bytes` is a multiple of 64. Never 0.
std::uint64_t checksum(const void* data, std::int64_t bytes);

}  // namespace poise::offload
