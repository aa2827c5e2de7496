// The CPU allocator that stamps each block with ledger and account. It stands in torch's place
// while at least one Ledger lives.
#pragma once

#include <memory>

#include "poise/memory.h"

namespace poise::memory {

// Counted: the first call installs the allocator, the last release puts the previous one back.
void install_counting_allocator();
void release_counting_allocator();

// The ledger of threads without a scope; null: none.
void set_default_ledger(std::shared_ptr<LedgerState> ledger);
void drop_default_ledger(const LedgerState* ledger);  // where it is the default

}  // namespace poise::memory
