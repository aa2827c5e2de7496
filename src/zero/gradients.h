// Takes gradients as autograd makes them: a hook on each parameter's gradient accumulator adds the
// gradient to the flat accumulator and hands nothing on, so that .grad never exists.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <vector>

#include "poise/core.h"
#include "zero/flat_store.h"

namespace poise::zero {

class Gradients {
 public:
  // `store` and `table` outlive this. Hooks of a dropped Gradients let gradients pass untouched.
  Gradients(const ParamTable& table, FlatStore& store);
  ~Gradients();
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  // While it lives gradients are taken; otherwise a backward of the user's own fills .grad as
  // usual. `last`: the window's last micro-batch, whose pass over memory also yields the norms.
  class Taking {
   public:
    Taking(Gradients& gradients, bool last);
    ~Taking();
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    Gradients& gradients_;
  };

  // Makes every accumulator whole at the end of a window: zeros where no gradient came, norms where
  // the last pass did not make them.
  void finish_window();

  // Sum of squares of each entry's accumulator (fp64, device of the model), valid after
  // finish_window(); 0 for frozen entries.
  const at::Tensor& squared_norms() const { return squared_norms_; }

  // The entry's norm must be made again (its accumulator was written).
  void invalidate_norm(int entry);

  // Drops what was accumulated.
  void start_window();

 private:
  struct EntryState {
    bool arrived = false;     // in this window
    bool norm_valid = false;  // for what the accumulator holds now
  };
  struct Hook;
  struct Shared;

  void take(int entry, const at::Tensor& gradient);
  at::Tensor dense(int entry, const at::Tensor& gradient);
  void make_norm(int entry);

  const ParamTable& table_;
  FlatStore& store_;
  std::vector<EntryState> entries_;
  at::Tensor squared_norms_;  // [entries] fp64
  bool last_ = false;
  bool sparse_noted_ = false;
  std::shared_ptr<Shared> shared_;
  // Held: a tensor keeps only a weak pointer to its accumulator, and the hook lives in the
  // accumulator.
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
};

}  // namespace poise::zero
