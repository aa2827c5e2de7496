// The backward's side of units: marks in the graph, claims that begin and end with gradients.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "poise/error.h"
#include "zero/units.h"

namespace poise::zero {
namespace {

int graph_task() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace

bool Units::in_backward() { return graph_task() != -1; }

// One forward through a unit, as its backward needs to know it.
struct Units::Call {
  int unit = 0;
  bool marked = false;  // some input needs a gradient
  std::int64_t epoch = 0;
  int task = -1;  // the last backward that reached it
};

// An identity on all inputs that need gradients; its backward is the end of the unit's.
struct Units::Mark : torch::autograd::Function<Units::Mark> {
  struct Owner : torch::CustomClassHolder {
    std::weak_ptr<Units> units;
    int unit = 0;
    bool outside = false;
    std::int64_t epoch = 0;
  };
  static Tensors forward(torch::autograd::AutogradContext* context,
                         const c10::intrusive_ptr<Owner>& owner, at::TensorList inputs) {
    context->set_materialize_grads(false);
    context->saved_data["owner"] = c10::IValue::make_capsule(owner);
    Tensors outputs;
    for (const auto& input : inputs) outputs.push_back(input.view_as(input));
    return outputs;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto owner =
        c10::static_intrusive_pointer_cast<Owner>(context->saved_data["owner"].toCapsule());
    if (const auto units = owner->units.lock()) {
      units->backward_ends(owner->unit, owner->outside, owner->epoch);
    }
    gradients.insert(gradients.begin(), at::Tensor());  // of the owner
    return gradients;
  }
};

Units::Tensors Units::mark(int unit, const Tensors& inputs) {
  auto& s = state(unit);
  Tensors differentiable;
  for (const auto& input : inputs) {
    if (input.defined() && input.requires_grad()) differentiable.push_back(input);
  }
  if (differentiable.empty()) {
    s.unmarked = s.unmarked || !in_backward();
    return inputs;
  }
  const auto owner = c10::make_intrusive<Mark::Owner>();
  owner->units = weak_from_this();
  owner->unit = unit;
  owner->outside = !in_backward();
  owner->epoch = epoch_;
  // As a list: a vector would silently be no input at all.
  const auto marked = Mark::apply(owner, at::TensorList(differentiable));
  s.open_calls.back() = 1;
  if (owner->outside) ++s.marks;
  Tensors outputs;
  std::size_t next = 0;
  for (const auto& input : inputs) {
    outputs.push_back(input.defined() && input.requires_grad() ? marked[next++] : input);
  }
  return outputs;
}

// The first gradient of one of a call's outputs begins its backward. Of a view also that of its
// base: where that is changed in place later, through this view or another, the gradient goes
// around what the view was made by.
void Units::watch(int unit, bool marked, const Tensors& outputs) {
  const auto call = std::make_shared<Call>();
  call->unit = unit;
  call->marked = marked;
  call->epoch = epoch_;
  const auto begins = [weak = weak_from_this(), call](const at::TensorBase&) {
    if (const auto units = weak.lock()) units->backward_begins(call);
  };
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    output.register_hook(begins);
    if (output.is_view() && output._base().grad_fn()) output._base().register_hook(begins);
  }
}

void Units::check_epoch(std::int64_t epoch) const {
  if (epoch == epoch_) return;
  fail("zero", "backward reached a forward whose window was discarded; run the forward again");
}

void Units::refuse_double_backward(int unit) const {
  if (!at::GradMode::is_enabled()) return;
  fail("zero", "a backward with create_graph went through unit '",
       table_.units()[static_cast<std::size_t>(unit)],
       "', whose parameters are sharded and gone by the time a second backward would need them; "
       "use zero.stage 2 for double backward");
}

void Units::backward_begins(const std::shared_ptr<Call>& call) {
  check_epoch(call->epoch);
  refuse_double_backward(call->unit);
  const int task = graph_task();
  if (call->task == task) return;  // another output of the same call
  call->task = task;
  if (std::find(tasks_.begin(), tasks_.end(), task) == tasks_.end()) {
    tasks_.push_back(task);
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
      if (const auto units = weak.lock()) units->graph_task_ends(task);
    });
  }
  for (const int needed : table_.needs(call->unit)) {
    state(needed).backward_claims.push_back({task, call->marked});
  }
  for (const int needed : table_.needs(call->unit)) ensure(needed);
}

void Units::backward_ends(int unit, bool outside, std::int64_t epoch) {
  check_epoch(epoch);
  const int task = graph_task();
  auto& s = state(unit);
  // [Note: moment of the reduce] It must be the same on all ranks whatever their data: not when all
  // gradients have come (one may be unused on one rank only), but at the end of the backward of the
  // unit's first call, zeros for what did not come. Where gradients may still come after it (from
  // a call without a mark, or from another unit with a tied parameter), at the end of the
  // micro-batch.
  if (outside) ++s.marks_passed;
  const bool last = !outside || s.marks_passed == s.marks;
  if (last && !s.unmarked && !s.shared) backward_ended_(unit);
  for (const int needed : table_.needs(unit)) {
    auto& claims = state(needed).backward_claims;
    const auto mine = std::find_if(claims.begin(), claims.end(),
                                   [&](const Claim& c) { return c.task == task && c.has_mark; });
    if (mine != claims.end()) claims.erase(mine);
    if (!state(needed).claimed() && !keep_gathered_) release(needed);
  }
}

void Units::graph_task_ends(int task) {
  tasks_.erase(std::remove(tasks_.begin(), tasks_.end(), task), tasks_.end());
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    auto& s = states_[unit];
    std::erase_if(s.backward_claims, [&](const Claim& claim) { return claim.task == task; });
    if (tasks_.empty() && !s.claimed() && !keep_gathered_) release(static_cast<int>(unit));
  }
}

}  // namespace poise::zero
