// What a run tells while it goes on and when it ends: lines for people, lines for programs, the
// summary.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cli/metrics.h"
#include "cli/train.h"
#include "poise/core.h"
#include "poise/log.h"
#include "poise/memory.h"
#include "poise/plan.h"

namespace poise::cli {

class Report {
 public:
  Report(const Config& config, Output output, int ranks);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  void banner(const std::vector<std::string>& lines);
  void update(const StepResult& result, double seconds);                   // seconds: data and step
  void compared(const plan::Plan& predicted, const StepResult& measured);  // after the first update
  void validation(double loss);
  void sample(const std::string& prompt, const std::string& text);
  void note(const std::string& line);

  // What a save keeps of the report, and a resumed run's that goes on from it.
  std::string text() const;
  void go_on(const std::string& text);
  void begin_anew();
  std::int64_t updates() const { return updates_; }

  // The last line of metrics.jsonl and of the text. `error`: why the run did not come to its end.
  // `held`: the books of a run that failed before any update was reported.
  void finish(const std::optional<std::string>& error, const std::optional<memory::Snapshot>& held);

 private:
  void line(const std::string& text);  // ends a live line first
  void live(const std::string& text);
  void write_update(const StepResult& result);
  double tokens_per_second() const;  // over the run, first update left out

  const Config& config_;
  Output output_;
  int ranks_;
  Metrics metrics_;
  bool terminal_;
  bool live_ = false;  // a line without its end is on the screen
  log::Sink old_sink_;

  std::int64_t updates_ = 0;
  std::vector<double> losses_;
  double tokens_ = 0, steady_tokens_ = 0, steady_seconds_ = 0;
  double logged_loss_ = 0, logged_tokens_ = 0,
         logged_seconds_ = 0;  // since the last line of the log
  std::int64_t logged_updates_ = 0;
  std::int64_t host_bytes_ = 0, file_bytes_ = 0;  // offloaded
  std::int64_t peak_bytes_ = 0;
  std::array<std::int64_t, memory::kAccounts> accounts_{};  // at that peak
  std::int64_t skipped_ = 0;
  std::optional<double> validation_loss_;
  std::string sample_;
};

}  // namespace poise::cli
