// Claims of forwards, gathers and those made ahead; unit_backward.cpp has the backward's side.
#include "zero/units.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "poise/error.h"
#include "poise/zero.h"

namespace poise::zero {
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
  auto& s = state(unit);
  for (const int flat : s.flats) store_.make_room(flat);
  s.in_flight = true;  // discard() knows of it where a wait is interrupted
  for (const int flat : s.flats) s.gathers.push_back(store_.gather_parameters(flat));
  for (const auto& gather : s.gathers) following_.wait(gather);
  s.gathers.clear();
  s.in_flight = false;
  for (const int flat : s.flats) store_.release(flat);
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
  RECORD_USER_SCOPE("poise::gather");
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

void Units::leave(int unit, const Tensors& outputs) {
  POISE_CHECK(!state(unit).open_calls.empty());
  const bool marked = state(unit).open_calls.back() != 0;
  state(unit).open_calls.pop_back();
  if (at::GradMode::is_enabled()) watch(unit, marked, outputs);
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
  // A rank that followed to the end waits for one more micro-batch: what an evaluation gathers now
  // must not count as that.
  recording_ = false;
  gathered_.clear();
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
    s.forward_claims = 0;
    s.open_calls.clear();
    s.backward_claims.clear();
    s.marks = s.marks_passed = 0;
    s.unmarked = false;
    s.idle = false;
    bool over = true;
    for (const auto& gather : s.gathers) {
      try {
        gather.wait();
      } catch (...) {
        // Discarding follows a failure; this one has the same cause. But an interrupt ends the wait
        // alone, and the gather still writes: who needs the unit next waits for it.
        over = over && gather.done();
      }
    }
    if (!over) continue;
    s.gathers.clear();
    s.in_flight = false;
    s.live = true;  // also releases what was in flight
    release(static_cast<int>(unit));
  }
}

void Units::claim_all() {
  for (std::size_t unit = 0; unit < states_.size(); ++unit) ++states_[unit].forward_claims;
  try {
    for (std::size_t unit = 0; unit < states_.size(); ++unit) ensure(static_cast<int>(unit));
  } catch (...) {  // nobody would end these claims
    release_all();
    throw;
  }
}

void Units::claim(int unit) {
  ++state(unit).forward_claims;
  try {
    ensure(unit);
  } catch (...) {
    let_go(unit);
    throw;
  }
}

void Units::let_go(int unit) {
  --state(unit).forward_claims;
  release_unclaimed(unit);
}

void Units::release_all() {
  for (std::size_t unit = 0; unit < states_.size(); ++unit) {
    --states_[unit].forward_claims;
    release_unclaimed(static_cast<int>(unit));
  }
}

}  // namespace poise::zero
