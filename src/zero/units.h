// When the parameters of a unit are whole: gathered before its forward, released after it, gathered
// again for its backward, the next unit already on its way.
//
// [Note: claims] A unit is whole while something claims it: a forward that runs, or a backward
// through one of its calls. A backward claim begins with the first gradient that reaches an output
// of the call and ends when the call's inputs get theirs (a mark, an identity on the inputs that
// need gradients); where no input needs one, with the backward as a whole. A forward that ends
// inside a backward (a recompute) leaves its unit idle: whole until another unit is needed or the
// backward ends, so that recompute and backward share one gather.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "poise/core.h"
#include "zero/flat_store.h"
#include "zero/following.h"

namespace poise::zero {

class Units : public std::enable_shared_from_this<Units> {
 public:
  using Tensors = std::vector<at::Tensor>;
  // `backward_ended(unit)`: all gradients of the unit's calls have come.
  Units(const ParamTable& table, FlatStore& store, const Shards& shards, Following& following,
        bool keep_gathered, std::function<void(int unit)> backward_ended);

  // Parameters in no unit are whole from hold_rest() on, until let_rest_go() or end_window().
  void hold_rest();
  void let_rest_go();
  bool holds_rest() const { return holds_rest_; }

  // A forward that will be followed by a backward: its gathers are recorded, and those of the
  // micro-batch after it are made one unit ahead.
  void begin_recording();
  void end_micro_batch();  // forgets claims that a backward left
  // A rank that follows takes part in a gather of the unit and keeps nothing.
  void follow_gather(int unit);
  void end_window();  // releases what was kept for it
  // Waits for what is in flight and releases everything; backward through earlier calls throws.
  // Gathers that were submitted are waited for, and what they brought is dropped.
  void discard();
  // Counts discards: claims of before are gone.
  std::int64_t epoch() const { return epoch_; }

  Tensors enter(int unit, const Tensors& inputs);
  void leave(int unit, const Tensors& outputs);
  void abandon(int unit) noexcept;

  // All parameters whole, whatever happens meanwhile, until the matching call.
  void claim_all();
  void release_all();
  // The same of one unit.
  void claim(int unit);
  void let_go(int unit);

 private:
  struct Claim {
    int task;  // the backward's graph task
    bool has_mark;
  };
  struct State {
    std::vector<int> flats;
    bool shared = false;  // other units use its (tied) parameters, too
    int forward_claims = 0;
    std::vector<char> open_calls;  // of forwards that run: whether their inputs were marked
    std::vector<Claim> backward_claims;
    std::vector<Event> gathers;
    bool in_flight = false;  // between submit() and land()
    bool live = false;
    bool idle = false;
    int marks = 0;  // calls of this micro-batch whose end of backward is marked
    int marks_passed = 0;
    bool unmarked = false;  // a call of this micro-batch whose end of backward is not
    bool claimed() const { return forward_claims > 0 || !backward_claims.empty(); }
  };
  struct Call;
  struct Mark;
  State& state(int unit) { return states_[static_cast<std::size_t>(unit)]; }

  static bool in_backward();
  Tensors mark(int unit, const Tensors& inputs);
  void watch(int unit, bool marked, const Tensors& outputs);
  void ensure(int unit);
  void submit(int unit);
  void land(int unit);
  void gather_ahead();
  void release_unclaimed(int unit);
  void release(int unit);
  void release_idle(int except);
  void backward_begins(const std::shared_ptr<Call>& call);
  void backward_ends(int unit, bool outside, std::int64_t epoch);
  void graph_task_ends(int task);
  void check_epoch(std::int64_t epoch) const;
  void refuse_double_backward(int unit) const;

  const ParamTable& table_;
  FlatStore& store_;
  Following& following_;
  const bool keep_gathered_;
  std::function<void(int)> backward_ended_;
  std::vector<State> states_;
  std::vector<int> tasks_;  // graph tasks that have our callback
  std::int64_t epoch_ = 0;
  bool holds_rest_ = false;
  bool recording_ = false;
  bool plan_holds_ = false;    // this micro-batch gathered as the plan says, so far
  std::vector<int> gathered_;  // units in order of their gathers in this micro-batch
  std::vector<int> plan_;      // of the one before
};

}  // namespace poise::zero
