// Takes gradients as autograd makes them: a hook on each parameter's gradient accumulator adds the
// gradient to its flat's pile and hands nothing on, so that .grad never exists. Over several ranks
// piles are joined by the Reducer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <vector>

#include "poise/core.h"
#include "zero/flat_store.h"
#include "zero/reducer.h"

namespace poise::zero {

enum class MicroBatch { inner, last };  // of its window
enum class Count { no, yes };

class Gradients {
 public:
  // All references outlive this. Hooks of a dropped Gradients let gradients pass untouched.
  Gradients(const ParamTable& table, FlatStore& store, const Shards& shards,
            const comm::Ranks& ranks, const config::ZeroPolicy& policy, Following& following,
            const memory::Ledger& ledger);
  ~Gradients();
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  // While it lives gradients are taken; otherwise a backward of the user's own fills .grad as
  // usual. Uncounted ones are dropped: their backward runs for the sake of other ranks.
  class Taking {
   public:
    Taking(Gradients& gradients, MicroBatch position, Count count = Count::yes);
    ~Taking();
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    Gradients& gradients_;
  };

  // The end of a micro-batch's backward: what has to be joined now and was not yet, is.
  void end_micro_batch();

  // The backward of a unit has ended; only where parameters are sharded.
  void join_unit(int unit) { reducer_.join_unit(unit); }

  // A micro-batch that other ranks run and this one does not, where the order of joins is known:
  // their gradients are joined with zeros.
  void follow_micro_batch(MicroBatch position);
  // The same where other ranks say the order, flat by flat.
  void begin_following(bool joins) { reducer_.begin_micro_batch(joins); }
  void join_flat(int flat) { reducer_.join_flat(flat); }
  void end_following() { reducer_.end_following(); }
  // The micro-batch failed: its gradients that are not on their way are dropped.
  void drop_unjoined() { reducer_.drop_unjoined(); }

  // After the first micro-batch of a window: the square sum of what this rank has of the sums so
  // far, its shard where every micro-batch is joined, else all of its own.
  double squares_so_far();

  // What no micro-batch was the last for is joined, too: before finish_window().
  void join_window();

  // Makes every accumulator whole at the end of a window that is joined: zeros where no gradient
  // came, joined over replicas, norms where the last pass did not make them.
  void finish_window();

  // Sum of squares of each entry's summed gradient, as far as it lies in this rank's shard (fp64,
  // device of the model), valid after finish_window(); 0 for frozen entries.
  const at::Tensor& squared_norms() const { return squared_norms_; }

  // The entry's norm must be made again (its accumulator was written).
  void make_norm(int entry);

  // Drops what was accumulated.
  void start_window();

 private:
  struct Hook;
  struct Shared;

  void begin_micro_batch(MicroBatch position);
  bool joins(MicroBatch position) const {
    return position == MicroBatch::last || shards_.reduces_every_micro_batch();
  }
  void take(int entry, const at::Tensor& gradient);
  at::Tensor dense(int entry, const at::Tensor& gradient);
  void make_norms();
  void make_norms_of(int flat, std::size_t begin, std::size_t end);
  void join_replicas();

  const ParamTable& table_;
  FlatStore& store_;
  const Shards& shards_;
  comm::Group& replicas_;
  Following& following_;
  Reducer reducer_;
  std::vector<char> norm_valid_;  // by entry: for what the accumulator holds now
  at::Tensor squared_norms_;      // [entries] fp64
  MicroBatch position_ = MicroBatch::inner;
  bool counts_ = true;
  bool replicas_joined_ = false;  // in this window
  bool sparse_noted_ = false;
  std::shared_ptr<Shared> shared_;
  // Held: a tensor keeps only a weak pointer to its accumulator, and the hook lives in the
  // accumulator.
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
};

}  // namespace poise::zero
