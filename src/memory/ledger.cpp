// Ledger: the owner's handle on the books. Its life is what keeps the counting allocator installed.
#include <exception>

#include "memory/counting_allocator.h"
#include "memory/gpu_allocations.h"
#include "memory/ledger_state.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {

Ledger::Ledger() : state_(std::make_shared<LedgerState>()) { install_counting_allocator(); }

Ledger::~Ledger() {
  if (!state_->device().is_cpu() && budget() > 0) {
    try {
      lift_gpu_limit(state_->device(), this);
    } catch (const std::exception&) {  // the device is lost
    }
  }
  drop_default_ledger(state_.get());
  release_counting_allocator();
}

void Ledger::set_device(c10::Device device) {
  if (!device.is_cpu()) watch_gpu_allocations(device);
  state_->set_device(device);
}

Snapshot Ledger::snapshot() const { return state_->snapshot(); }

void Ledger::reset_peak() { state_->reset_peak(); }

void Ledger::set_budget(std::int64_t bytes) {
  if (bytes < 0) fail("memory", "negative budget: ", bytes, "; give bytes, or 0 for no limit");
  if (!state_->device().is_cpu() && bytes != budget())
    limit_gpu_memory(state_->device(), bytes, this);
  state_->set_budget(bytes);
}

std::int64_t Ledger::budget() const { return state_->budget(); }

void Ledger::make_default() { set_default_ledger(state_); }

}  // namespace poise::memory
