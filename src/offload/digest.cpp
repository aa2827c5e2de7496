// XXH64 by the library's header; XXH3 by the kernels, which choose an instruction set.
#include "offload/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdio>

namespace poise::offload {
namespace {

static_assert(sizeof(kernels::DigestState) >= sizeof(XXH64_state_t));

XXH64_state_t* state_in(kernels::DigestState& state) {
  return reinterpret_cast<XXH64_state_t*>(&state);
}

}  // namespace

Digest::Digest(Hash hash) : hash_(hash) {
  if (hash_ == Hash::xxh3) {
    kernels::digest_begin(state_);
  } else {
    XXH64_reset(state_in(state_), 0);
  }
}

void Digest::update(const void* data, std::size_t size) {
  if (hash_ == Hash::xxh3) {
    kernels::digest_update(state_, data, size);
  } else {
    XXH64_update(state_in(state_), data, size);
  }
}

std::uint64_t Digest::value() const {
  if (hash_ == Hash::xxh3) return kernels::digest_value(state_);
  return XXH64_digest(reinterpret_cast<const XXH64_state_t*>(&state_));
}

std::uint64_t xxh64_of(const std::string& bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

std::string hex(std::uint64_t digest) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(digest));
  return text;
}

}  // namespace poise::offload
