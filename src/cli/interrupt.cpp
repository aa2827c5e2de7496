// A signal handler can reach nothing but a global, hence the one here.
#include "cli/interrupt.h"

#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

namespace poise::cli {
namespace {

volatile std::sig_atomic_t received = 0;
volatile std::sig_atomic_t saves_wait = 0;  // an InterruptScope::SavesWait

void note(int signal) { received = signal; }

// [Note: signals that come twice] Slurm sends one to every process, and torchrun, which gets it,
// too, passes it on. The save must live through that; whoever waits and sends it again ends it.
constexpr std::int64_t kSameSignal = 3;  // seconds

std::int64_t seconds_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

std::atomic<std::int64_t> first_term, first_user;  // seconds at which each came; 0: not yet
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

void note_once(int signal) {
  auto& first = signal == SIGTERM ? first_term : first_user;
  const auto now = seconds_now();
  if (first == 0) {
    first = std::max<std::int64_t>(1, now);
    received = signal;
  } else if (now - first > kSameSignal) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // once this handler is over
  }
}

std::thread::id of_run;  // what is thrown on another thread, one of autograd's, nobody catches

void throw_if_received(InterruptScope::SavesWait where) {
  if (received == 0 || std::this_thread::get_id() != of_run) return;
  if (saves_wait >= static_cast<int>(where) && InterruptScope::asks_for_save(received)) return;
  throw Interrupted{received};
}

void throw_in_wait() { throw_if_received(InterruptScope::SavesWait::in_waits); }

}  // namespace

InterruptScope::InterruptScope(bool saves) : saves_(saves) {
  received = 0;
  saves_wait = static_cast<int>(SavesWait::nowhere);
  of_run = std::this_thread::get_id();
  struct sigaction action = {};
  action.sa_handler = note;
  sigemptyset(&action.sa_mask);
  // The default comes back after the first signal: a run that hangs can still be ended.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, &old_int_);
  // A shell lets what it starts in the background ignore Ctrl-C, which is meant for others.
  if (old_int_.sa_handler == SIG_IGN) sigaction(SIGINT, &old_int_, nullptr);
  first_term = first_user = 0;
  if (saves_) {
    action.sa_handler = note_once;
    action.sa_flags = SA_RESTART;
  }
  sigaction(SIGTERM, &action, &old_term_);
  if (saves_) sigaction(SIGUSR1, &action, &old_user_);
  old_check_ = set_interrupt_check(throw_in_wait);
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

void InterruptScope::check() const { throw_if_received(SavesWait::everywhere); }
void InterruptScope::put_saves_off(SavesWait until) { saves_wait = static_cast<int>(until); }

}  // namespace poise::cli
