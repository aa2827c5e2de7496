// A signal handler can reach nothing but a global, hence the one here.
#include "cli/interrupt.h"

#include <signal.h>

namespace poise::cli {
namespace {

volatile std::sig_atomic_t received = 0;

void note(int signal) { received = signal; }

void throw_if_received() {
  if (received != 0) throw Interrupted{received};
}

}  // namespace

InterruptScope::InterruptScope() {
  received = 0;
  struct sigaction action = {};
  action.sa_handler = note;
  sigemptyset(&action.sa_mask);
  // The default comes back after the first signal: a run that hangs can still be ended.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, &old_int_);
  sigaction(SIGTERM, &action, &old_term_);
  old_check_ = set_interrupt_check(throw_if_received);
}

InterruptScope::~InterruptScope() {
  set_interrupt_check(old_check_);
  sigaction(SIGINT, &old_int_, nullptr);
  sigaction(SIGTERM, &old_term_, nullptr);
}

void InterruptScope::check() const { throw_if_received(); }

}  // namespace poise::cli
