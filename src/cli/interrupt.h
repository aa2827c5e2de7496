// Ctrl-C, SIGTERM and Slurm's SIGUSR1 during a run: noted by a handler, acted on between
// micro-batches and in waits, or, where all ranks must save first, where they can agree on it.
#pragma once

#include <csignal>

#include "poise/interrupt.h"

namespace poise::cli {

// While it lives, SIGINT and SIGTERM are noted instead of ending the process; a second one does end
// it. SIGUSR1 too in a run that saves, where one that asks for a save ends it a few seconds later
// at the earliest.
class InterruptScope {
 public:
  explicit InterruptScope(bool saves);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // Throws Interrupted if a signal has come.
  void check() const;
  // From now on not in waits for those that ask for a save, which half an update, or a save in its
  // middle, would not leave to be made; nor in check() where other ranks are in the same update.
  enum class SavesWait { nowhere, in_waits, everywhere };
  void put_saves_off(SavesWait until);
  // The signal that asks for a save and the end of the run, once; 0: none has come.
  int take_save();
  static bool save_is_asked();
  static bool asks_for_save(int signal);

 private:
  bool saves_;
  struct sigaction old_int_;
  struct sigaction old_term_;
  struct sigaction old_user_;
  void (*old_check_)();
};

}  // namespace poise::cli
