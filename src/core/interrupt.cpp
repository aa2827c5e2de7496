// The one interrupt check of the process.
#include "poise/interrupt.h"

#include <atomic>

namespace poise {
namespace {

std::atomic<void (*)()> installed{nullptr};  // process-wide, as signals are

}  // namespace

void (*set_interrupt_check(void (*check)()))() { return installed.exchange(check); }

void check_interrupt() {
  if (auto* check = installed.load(std::memory_order_acquire)) check();
}

}  // namespace poise
