// Ctrl-C and SIGTERM during a run: noted by a handler, acted on between micro-batches and in waits.
#pragma once

#include <csignal>

#include "poise/interrupt.h"

namespace poise::cli {

// While it lives, SIGINT and SIGTERM are noted instead of ending the process; a second one does end
// it.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // Throws Interrupted if a signal has come.
  void check() const;

 private:
  struct sigaction old_int_;
  struct sigaction old_term_;
  void (*old_check_)();
};

}  // namespace poise::cli
