// Claims, gathers ahead, and the marks in the graph.
#include "zero/units.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "poise/error.h"
#include "poise/zero.h"

namespace poise::zero {
namespace {

int graph_task() { return torch::autograd::get_current_graph_task_id(); }
bool in_backward() { return graph_task() != -1; }

}  // namespace

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

Units::Units(const ParamTable& table, FlatStore& store, const Shards& shards, Following& following,
             bool keep_gathered, std::function<void(int)> backward_ended)
    : table_(table),
      store_(store),
      following_(following),
      keep_gathered_(keep_gathered),
      backward_ended_(std::move(backward_ended)),
      states_(table.units().size()) {
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    if (!shards.splits_parameters(flat)) continue;
    state(table.flats()[static_cast<std::size_t>(flat)].unit).flats.push_back(flat);
  }
  for (int unit = 0; unit < static_cast<int>(states_.size()); ++unit) {
    for (const int needed : table.needs(unit)) {
      if (needed != unit) state(needed).shared = true;
    }
  }
}

void Units::follow_gather(int unit) {
  POISE_CHECK(!state(unit).live, "unit ", unit);
  gathered_.push_back(unit);  // the plan of the next micro-batch, as on the ranks that ran
  for (const int flat : state(unit).flats) store_.make_room(flat);
  for (const int flat : state(unit).flats) following_.wait(store_.gather_parameters(flat));
  for (const int flat : state(unit).flats) store_.release(flat);
}

void Units::submit(int unit) {
  auto& s = state(unit);
  try {
    for (const int flat : s.flats) store_.make_room(flat);
  } catch (...) {  // out of memory: before any rank was told
    for (const int flat : s.flats) store_.release(flat);
    throw;
  }
  following_.take(Following::Operation::gather, unit);
  s.in_flight = true;
  for (const int flat : s.flats) s.gathers.push_back(store_.gather_parameters(flat));
  if (recording_) gathered_.push_back(unit);
  const auto last = gathered_.size();
  plan_holds_ = plan_holds_ && last <= plan_.size() && (last == 0 || plan_[last - 1] == unit);
}

void Units::land(int unit) {
  auto& s = state(unit);
  for (const auto& gather : s.gathers) following_.wait(gather);
  s.gathers.clear();
  for (const int flat : s.flats) store_.expose(flat);
  s.in_flight = false;
  s.live = true;
}

void Units::ensure(int unit) {
  release_idle(unit);
  auto& s = state(unit);
  s.idle = false;
  if (s.live) return;
  if (!s.in_flight) submit(unit);
  land(unit);
  gather_ahead();
}

// The unit that the micro-batch before this one gathered next.
void Units::gather_ahead() {
  if (!recording_ || !plan_holds_ || gathered_.size() >= plan_.size()) return;
  const int next = plan_[gathered_.size()];
  if (!state(next).live && !state(next).in_flight) submit(next);
}

void Units::release(int unit) {
  auto& s = state(unit);
  s.idle = false;
  if (!s.live) return;
  for (const int flat : s.flats) store_.release(flat);
  s.live = false;
}

void Units::release_unclaimed(int unit) {
  auto& s = state(unit);
  if (s.claimed()) return;
  if (in_backward()) {
    s.idle = true;
  } else if (!keep_gathered_ || !recording_) {
    release(unit);
  }
}

void Units::release_idle(int except) {
  if (keep_gathered_ && recording_) return;
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    const auto& s = states_[unit];
    if (s.idle && !s.claimed() && static_cast<int>(unit) != except) {
      release(static_cast<int>(unit));
    }
  }
}

void Units::hold_rest() {
  if (table_.rest_unit() < 0 || holds_rest_) return;
  ensure(table_.rest_unit());
  ++state(table_.rest_unit()).forward_claims;
  holds_rest_ = true;
}

void Units::let_rest_go() {
  if (!holds_rest_) return;
  holds_rest_ = false;
  --state(table_.rest_unit()).forward_claims;
  release_unclaimed(table_.rest_unit());
}

Units::Tensors Units::enter(int unit, const Tensors& inputs) {
  for (const int needed : table_.needs(unit)) ++state(needed).forward_claims;
  state(unit).open_calls.push_back(0);
  try {
    for (const int needed : table_.needs(unit)) ensure(needed);
    return at::GradMode::is_enabled() ? mark(unit, inputs) : inputs;
  } catch (...) {
    abandon(unit);
    throw;
  }
}

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

void Units::leave(int unit, const Tensors& outputs) {
  POISE_CHECK(!state(unit).open_calls.empty());
  const bool marked = state(unit).open_calls.back() != 0;
  state(unit).open_calls.pop_back();
  if (at::GradMode::is_enabled()) {
    const auto call = std::make_shared<Call>();
    call->unit = unit;
    call->marked = marked;
    call->epoch = epoch_;
    for (const auto& output : outputs) {
      if (!output.defined() || !output.requires_grad()) continue;
      output.register_hook([weak = weak_from_this(), call](const at::Tensor&) {
        if (const auto units = weak.lock()) units->backward_begins(call);
      });
    }
  }
  for (const int needed : table_.needs(unit)) {
    --state(needed).forward_claims;
    release_unclaimed(needed);
  }
}

void Units::abandon(int unit) noexcept {
  auto& open_calls = state(unit).open_calls;
  if (open_calls.empty()) return;  // its window was discarded meanwhile
  open_calls.pop_back();
  for (const int needed : table_.needs(unit)) {
    --state(needed).forward_claims;
    try {
      release_unclaimed(needed);
    } catch (...) {
      // The failure that abandons the forward is the one to be told.
    }
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

void Units::begin_recording() {
  if (!recording_) plan_holds_ = !plan_.empty();
  recording_ = true;
}

void Units::end_micro_batch() {
  tasks_.clear();  // of a backward that threw, and whose failure the user's code caught
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    auto& s = states_[unit];
    if (s.in_flight) land(static_cast<int>(unit));  // gathered ahead, then not needed
    s.marks = s.marks_passed = 0;
    s.unmarked = false;
    s.backward_claims.clear();
    if (s.forward_claims == 0 && !keep_gathered_) release(static_cast<int>(unit));
  }
  // With what is kept for the window, only its first micro-batch gathers.
  if (recording_ && !keep_gathered_) plan_ = std::move(gathered_);
  gathered_.clear();
  recording_ = false;
}

void Units::end_window() {
  let_rest_go();
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    if (states_[unit].forward_claims == 0) release(static_cast<int>(unit));
  }
}

void Units::discard() {
  ++epoch_;
  recording_ = false;
  holds_rest_ = false;
  gathered_.clear();
  plan_.clear();
  tasks_.clear();
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    auto& s = states_[unit];
    for (const auto& gather : s.gathers) {
      try {
        gather.wait();
      } catch (...) {
        // Discarding follows a failure; this one has the same cause.
      }
    }
    s.gathers.clear();
    s.forward_claims = 0;
    s.open_calls.clear();
    s.backward_claims.clear();
    s.marks = s.marks_passed = 0;
    s.unmarked = false;
    s.in_flight = false;
    s.live = true;  // also releases what was in flight
    release(static_cast<int>(unit));
  }
}

void Units::claim_all() {
  for (std::size_t unit = 0; unit < states_.size(); ++unit) ++states_[unit].forward_claims;
  for (std::size_t unit = 0; unit < states_.size(); ++unit) ensure(static_cast<int>(unit));
}

void Units::release_all() {
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    --states_[unit].forward_claims;
    release_unclaimed(static_cast<int>(unit));
  }
}

at::Tensor Unit::operator()(const std::function<at::Tensor(const at::Tensor&)>& forward,
                            const at::Tensor& input) const {
  return (*this)([&](const Tensors& inputs) { return Tensors{forward(inputs.front())}; },
                 Tensors{input})
      .front();
}

Unit::Tensors Unit::operator()(const std::function<Tensors(const Tensors&)>& forward,
                               const Tensors& inputs) const {
  if (units_.expired()) return forward(inputs);
  Tensors outputs;
  const auto entered = enter(inputs);
  try {
    outputs = forward(entered);
  } catch (...) {
    abandon();
    throw;
  }
  leave(outputs);
  return outputs;
}

Unit::Tensors Unit::enter(const Tensors& inputs) const {
  const auto units = units_.lock();
  return units ? units->enter(index_, inputs) : inputs;
}

void Unit::leave(const Tensors& outputs) const {
  if (const auto units = units_.lock()) units->leave(index_, outputs);
}

void Unit::abandon() const noexcept {
  if (const auto units = units_.lock()) units->abandon(index_);
}

}  // namespace poise::zero
