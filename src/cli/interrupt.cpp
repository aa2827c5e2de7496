// A signal handler can reach nothing but a global, hence the one here.
#include "cli/interrupt.h"

#include <signal.h>

#include <thread>

namespace poise::cli {
namespace {

volatile std::sig_atomic_t received = 0;
volatile std::sig_atomic_t saves_are_put_off = 0;

void note(int signal) { received = signal; }

std::thread::id of_run;  // what is thrown on another thread, one of autograd's, nobody catches

void throw_if_received() {
  if (received == 0 || std::this_thread::get_id() != of_run) return;
  if (saves_are_put_off != 0 && InterruptScope::asks_for_save(received)) return;
  throw Interrupted{received};
}

}  // namespace

InterruptScope::InterruptScope(bool saves) : saves_(saves) {
  received = 0;
  saves_are_put_off = 0;
  of_run = std::this_thread::get_id();
  struct sigaction action = {};
  action.sa_handler = note;
  sigemptyset(&action.sa_mask);
  // The default comes back after the first signal: a run that hangs can still be ended.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, &old_int_);
  sigaction(SIGTERM, &action, &old_term_);
  if (saves_) sigaction(SIGUSR1, &action, &old_user_);
  old_check_ = set_interrupt_check(throw_if_received);
}

InterruptScope::~InterruptScope() {
  set_interrupt_check(old_check_);
  sigaction(SIGINT, &old_int_, nullptr);
  sigaction(SIGTERM, &old_term_, nullptr);
  if (saves_) sigaction(SIGUSR1, &old_user_, nullptr);
}

bool InterruptScope::asks_for_save(int signal) { return signal == SIGTERM || signal == SIGUSR1; }

bool InterruptScope::save_is_asked() { return asks_for_save(received); }

int InterruptScope::take_save() {
  const int signal = received;
  if (!asks_for_save(signal)) return 0;
  received = 0;  // or the save's own waits would end
  return signal;
}

void InterruptScope::check() const { throw_if_received(); }
void InterruptScope::put_saves_off() { saves_are_put_off = 1; }

}  // namespace poise::cli
