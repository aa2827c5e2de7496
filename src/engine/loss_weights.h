// Stop 6: weighs the losses of a window's micro-batches so that their gradients add up to the
// gradient of the mean over all counted tokens, and keeps the sums that stop 8 divides by.
//
// [Note: weights without look-ahead] A mean over n tokens is weighted n 2^-q, a sum 2^-q; the
// division by N = sum of n comes once, when the window closes. q is 0 except in fp16, where it is
// ceil(log2 n) of the run's first micro-batch that counts anything, so that the weighted loss stays
// near its own size; all of a window have the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "poise/comm.h"
#include "poise/config.h"
#include "poise/engine.h"

namespace poise::engine {

// The sum of the loss and its terms, unweighted: a backward through all of it whose gradients count
// for nothing. Throws Error where it has none.
at::Tensor everything(const Loss& loss);

class LossWeights {
 public:
  // `fp16`: whether q is read from the first micro-batch, that of rank 0 for all ranks; `wait`
  // waits for it.
  using Wait = std::function<void(const Event&)>;
  LossWeights(config::LossWeighting weighting, bool fp16, at::Device device, comm::Group& group,
              Wait wait);

  // `counts`: totals of the window for the main loss and each term; empty where there are no terms.
  void begin_window(std::vector<double> counts);

  // The scalar to run backward on, weighted and multiplied by `scale`. Undefined where nothing was
  // counted. Throws Error on a loss that cannot be weighted. `Empty::kept`: a part that counts
  // nothing stays in the graph beside others, with a gradient of 0, since other ranks may count it
  // and need this one in its backward.
  enum class Empty { left_out, kept };
  at::Tensor weigh(const Loss& loss, double scale, Empty empty = Empty::left_out);

  struct Totals {
    double tokens = 0;  // N
    double loss = 0;    // mean over N; NaN or inf where a micro-batch's was
  };
  // This rank's sums over the window, read from the device: loss, N, counts of the terms.
  std::vector<double> sums() const;
  // What the sums over all ranks come to. Throws Error where begin_window's counts were wrong.
  Totals totals(const std::vector<double>& sums) const;

  // The window is dropped: what was agreed on in it is open again.
  void forget_window() {
    if (agreed_in_window_) q_.reset();
  }
  // The window is over: what it agreed on stays, unless nothing was counted where it was read.
  void end_window() {
    if (std::exchange(only_for_window_, false)) q_.reset();
  }

  // A rank that has no micro-batch in the run's first window takes part in agreeing on q.
  void agree_without_micro_batch();

  // Makes a gradient sum a mean: 2^q / N.
  double mean_factor(double tokens) const;

  int q() const { return q_.value_or(0); }
  bool knows_q() const { return q_.has_value(); }
  void resume(std::optional<int> q) {  // that of a saved run
    q_ = q;
    only_for_window_ = false;
  }

 private:
  struct Part {
    at::Tensor value;                  // scalar, at least fp32
    at::Tensor count;                  // 0-dim
    std::optional<double> host_count;  // where reading it costs nothing
    bool is_mean = true;
  };
  Part part_of(const at::Tensor& value, Loss::Kind kind, const at::Tensor& count, bool is_term);
  void agree_on_q(double count);
  at::Tensor weigh_part(const Part& part, double share, double scale, std::size_t slot);

  config::LossWeighting weighting_;
  bool fp16_;
  comm::Group& group_;
  Wait wait_;
  std::optional<int> q_;
  bool agreed_in_window_ = false;
  bool only_for_window_ = false;  // q_: of a micro-batch that counted nothing
  std::vector<double> counts_;
  bool uncounted_noted_ = false;
  // fp64 on the device: [0] loss sum, [1] N, [2...] counts of the terms.
  at::Tensor sums_;
};

}  // namespace poise::engine
