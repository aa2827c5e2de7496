// Ctrl-C for waits of one thread.
#pragma once

#include "poise/interrupt.h"

namespace poise::testing {

// While it lives every wait of the thread that made it is interrupted.
class Interrupts {
 public:
  Interrupts() : before_(set_interrupt_check(throw_here)) { here_ = true; }
  ~Interrupts() {
    here_ = false;
    set_interrupt_check(before_);
  }
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

 private:
  static void throw_here() {
    if (here_) throw Interrupted{2};
  }
  static inline thread_local bool here_ = false;
  void (*const before_)();
};

}  // namespace poise::testing
