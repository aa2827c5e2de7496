// What an Engine is made of. build.cpp puts it together, train_step.cpp runs it.
#pragma once

#include <chrono>
#include <map>

#include "engine/loss_weights.h"
#include "poise/engine.h"
#include "poise/optim.h"
#include "poise/precision.h"
#include "zero/flat_store.h"
#include "zero/gradients.h"

namespace poise {

namespace engine {

// Multiplier and decay of one parameter group; the learning rate comes from the schedule.
struct Group {
  double lr_multiplier = 1;
  double weight_decay = 0;
};

// The optimizer's spans, one for each trainable flat, and the groups their segments refer to.
struct OptimizerSpans {
  std::vector<optim::Span> spans;
  std::vector<Group> groups;
};
OptimizerSpans make_spans(const ParamTable& table, zero::FlatStore& store,
                          const config::OptimizerPolicy& policy, const optim::Optimizer& optimizer,
                          const memory::Ledger& ledger);

enum class WindowState {
  closed,  // no micro-batch since the last update
  open,    // gradients are being accumulated
  summed,  // begin_update() ran: sums are known, gradients may be read and written
};

// Stop 8's outcome.
struct Sums {
  LossWeights::Totals totals;
  double grad_norm = 0;  // of the mean gradient, before clipping
  Status status = Status::applied;
  std::string first_bad_parameter;
};

// Pops what a failed backward left in this thread's autograd queue (its gradient buffers).
void drain_autograd_queue();

using Clock = std::chrono::steady_clock;
// Adds the time it lives to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace engine

struct Engine::Impl {
  Impl(const ModelView& model, const Config& config);

  // The stops, in order; train_step.cpp.
  void open_window(const std::vector<double>& counts);
  Loss forward(const std::function<Loss()>& loss);
  void backward(const Loss& loss, bool last);
  void sum_up();
  StepResult close_window();
  void discard_window();

  double clip_factor(double grad_norm) const;
  double unscale_factor(double tokens) const;
  void apply(double factor);
  void take_edited_gradients();
  std::vector<optim::GroupSettings> group_settings() const;
  double learning_rate() const;
  bool scales_loss() const { return config.precision.dtype == config::DType::fp16; }

  const Config config;
  const std::int64_t accumulation;  // micro-batches of a full window
  const ParamTable table;
  memory::Ledger ledger;
  zero::FlatStore store;
  zero::Gradients gradients;
  std::unique_ptr<optim::Optimizer> optimizer;
  engine::OptimizerSpans optimizer_spans;
  precision::LossScaler scaler;
  engine::LossWeights loss_weights;
  at::Device device;

  engine::WindowState state = engine::WindowState::closed;
  std::int64_t micro_batches = 0;
  std::int64_t updates = 0;
  std::int64_t skipped = 0;
  engine::Sums sums;
  // Handed out by gradient(): the entry's mean gradient, and a copy to see whether it was written.
  struct Lent {
    at::Tensor gradient;
    at::Tensor original;
  };
  std::map<int, Lent> lent;
  StepResult times;  // only its *_seconds
  engine::Clock::time_point window_start;
};

}  // namespace poise
