// The saves of `poise train`: when they are made, what they hold besides the engine's own, how a
// run goes on from one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/interrupt.h"
#include "cli/report.h"
#include "poise/data.h"
#include "poise/engine.h"

namespace poise::cli {

class RunState {
 public:
  // All outlive it.
  RunState(const Config& config, Engine& engine, data::WindowLoader& loader, Report& report,
           InterruptScope& interrupt);

  // From state.resume, before the first window.
  void resume();

  // Before the first window: what a save would take, and whether it can be made.
  void rehearse();

  // Around reading and training a window.
  void open_window();
  void close_window() { in_window_ = false; }

  // After a window and what belongs to it. Throws Interrupted, after a save, where a signal has
  // asked some rank for it.
  void save_if_due();
  void save_at_end();
  // One rank, whose signal came in the middle of something: an open window is given back.
  void save_at_signal(int signal);

 private:
  void save();
  int asked_on_any_rank();
  std::string data_identity() const;

  const Config& config_;
  const bool saves_;
  Engine& engine_;
  data::WindowLoader& loader_;
  Report& report_;
  InterruptScope& interrupt_;
  const std::string directory_;
  std::int64_t saved_ = -1;  // windows at the last save
  // Where the open window began.
  bool in_window_ = false;
  std::int64_t cursor_ = 0;
  std::vector<at::Tensor> random_;  // by generator
};

}  // namespace poise::cli
