// Ledger: the owner's handle on the books. Its life is what keeps the counting allocator installed.
#include "memory/counting_allocator.h"
#include "memory/ledger_state.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {

Ledger::Ledger() : state_(std::make_shared<LedgerState>()) { install_counting_allocator(); }

Ledger::~Ledger() {
  drop_default_ledger(state_.get());
  release_counting_allocator();
}

Snapshot Ledger::snapshot() const { return state_->snapshot(); }

void Ledger::reset_peak() { state_->reset_peak(); }

void Ledger::set_budget(std::int64_t bytes) {
  if (bytes < 0) fail("memory", "negative budget: ", bytes, "; give bytes, or 0 for no limit");
  state_->set_budget(bytes);
}

std::int64_t Ledger::budget() const { return state_->budget(); }

void Ledger::make_default() { set_default_ledger(state_); }

}  // namespace poise::memory
