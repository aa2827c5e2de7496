// Ctrl-C in long waits: the process says how to look for it, and every wait of poise looks.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "poise/export.h"

namespace poise {

// `check` is called about every 50 ms by waiting threads and throws to end the wait. The Python
// binding sets one that asks Python for signals; null (the default): waits are not interrupted.
// Returns the old one.
POISE_API void (*set_interrupt_check(void (*check)()))();
POISE_API void check_interrupt();

// What a signal makes a run throw. Not a std::exception, so that handlers of errors let it pass.
struct POISE_API Interrupted {
  int signal;
};

inline constexpr std::chrono::milliseconds kInterruptPeriod{50};
using Deadline = std::optional<std::chrono::steady_clock::time_point>;  // nullopt: none

// Waits on `condition` until ready() (true) or the deadline (false). The check runs without the
// lock: it may take Python's GIL, and whoever holds that may want the lock.
template <class Ready>
bool interruptible_wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                        Ready ready, Deadline deadline = std::nullopt) {
  for (;;) {
    auto until = std::chrono::steady_clock::now() + kInterruptPeriod;
    if (deadline) until = std::min(until, *deadline);
    if (condition.wait_until(lock, until, ready)) return true;
    if (deadline && std::chrono::steady_clock::now() >= *deadline) return false;
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
}

}  // namespace poise
