// Parameters that requires_grad takes out of the training and brings back while it goes on. While
// one is frozen, updates leave its value and its moments alone and it counts none of them, as with
// torch's optimizers, which have a step of their own for each parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/state_update.h"
#include "poise/core.h"

namespace poise::engine {

class Freezing {
 public:
  // `parameters`: of the table's entries, in their order.
  Freezing(const ParamTable& table, const std::vector<at::Tensor>& parameters);

  // What requires_grad says as a window opens. Throws Error where one is frozen and the optimizer
  // keeps what is no piece of one parameter.
  void open_window(const optim::Optimizer& optimizer);
  // Throws Error where it says something else by now: sums of a part of the window would be taken
  // for the gradient of all of it.
  void check_unchanged(std::int64_t micro_batches) const;
  bool is_frozen(std::size_t entry) const { return frozen_[entry] != 0; }
  // A number that ranks share while they have frozen the same parameters.
  double fingerprint() const;
  // Before an update: into its segments.
  void mark(std::vector<OptimizerState>& states) const;
  void count_update();  // one that was applied

  // Updates that a parameter missed.
  std::int64_t missed(int entry) const { return missed_[static_cast<std::size_t>(entry)]; }
  void set_missed(int entry, std::int64_t updates) {
    missed_[static_cast<std::size_t>(entry)] = updates;
  }
  void limit_missed(std::int64_t updates);  // nobody missed more than there were

 private:
  const ParamTable& table_;
  const std::vector<at::Tensor>& parameters_;
  std::vector<char> frozen_;  // by entry; those that were frozen at the build are not
  std::vector<std::int64_t> missed_;
};

}  // namespace poise::engine
