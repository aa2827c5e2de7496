// The accounts of the memory ledger. docs/concepts.md says what belongs to each.
#pragma once

#include <cstdint>

#include "poise/export.h"

namespace poise::memory {

enum class Account : std::uint8_t {
  parameters,     // the flats that hold parameters (and 16-bit copies)
  gathered,       // whole parameters gathered from shards
  gradients,      // accumulators
  optimizer,      // masters and moments
  activations,    // everything forward and backward allocate, incoming gradients too
  communication,  // buffers of collectives
  staging,        // copies on the way to or from host, file or saved state
  other,
};
inline constexpr int kAccounts = 8;
POISE_API const char* name_of(Account account);

}  // namespace poise::memory
