// The saves of `poise train`: when they are made, what they hold besides the engine's own, how a
// run goes on from one.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cli/interrupt.h"
#include "cli/report.h"
#include "poise/data.h"
#include "poise/engine.h"

namespace poise::cli {

// All ranks have saved since a signal asked some of them to, and the run ends.
struct SavedAtSignal {
  int signal;
};

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
  // Before a micro-batch of several ranks. Throws WindowDropped where a signal has asked a rank for
  // a save: this one, or one that has said so.
  void drop_if_asked();

  // A validation that a signal ends is made by the run that goes on from the save.
  void begin_validation();
  void leave_validation_if_asked();  // before a batch of several ranks; throws WindowDropped
  void validated(double loss);
  bool owes_validation() const { return owes_validation_; }  // the save resumed from
  // After a window and what belongs to it. Throws SavedAtSignal where a signal has asked some rank
  // for a save.
  void save_if_due();
  void save_at_end();
  void save_if_best();  // after a validation that came after save_at_end(): marks that save
  // One rank, whose signal came in the middle of something: an open window is given back.
  void save_at_signal(int signal);
  // All ranks, which have dropped the open window. Throws SavedAtSignal.
  void save_dropped();

 private:
  enum class Best { no, yes };
  void save(Best best);
  void give_window_back();
  [[noreturn]] void save_and_end(int signal);
  int asked_on_any_rank();
  std::string data_identity() const;

  const Config& config_;
  const bool saves_;
  Engine& engine_;
  data::WindowLoader& loader_;
  Report& report_;
  InterruptScope& interrupt_;
  const std::string directory_;
  std::string path_;                                       // of the last save
  std::int64_t saved_ = -1;                                // windows at the last save
  state::SaveOptions options_;                             // its own
  double best_ = std::numeric_limits<double>::infinity();  // validation loss
  bool is_best_ = false;                                   // the last one, and not saved yet
  std::string asked_note_;  // key of the note of a rank that a signal has asked for a save
  std::chrono::steady_clock::time_point looked_;  // for it
  bool validates_ = false, owes_validation_ = false;
  std::int64_t batches_ = 1, batches_left_ = 0;  // of a validation, until ranks ask each other
  // Where the open window began.
  bool in_window_ = false;
  std::int64_t cursor_ = 0;
  std::vector<at::Tensor> random_;  // by generator
};

}  // namespace poise::cli
