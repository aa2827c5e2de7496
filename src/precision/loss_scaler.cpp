// The loss scale of fp16 as a small state machine over windows: no tensors, no host sync.
#include <algorithm>
#include <cmath>

#include "poise/error.h"
#include "poise/precision.h"

namespace poise::precision {

LossScaler::LossScaler(const config::PrecisionPolicy& policy) : policy_(policy) {
  if (policy.dtype != config::DType::fp16)
    return;  // bf16 and fp32 have the range: scale 1 for ever
  dynamic_ = policy.loss_scale == 0;
  state_.scale =
      dynamic_ ? std::clamp(policy.initial_loss_scale, policy.min_loss_scale, policy.max_loss_scale)
               : policy.loss_scale;
}

bool LossScaler::update(bool overflow) {
  if (!dynamic_) return false;
  if (!overflow) {
    state_.overflows_in_row = 0;
    if (++state_.clean_updates >= policy_.loss_scale_growth_interval) {
      state_.scale = std::min(state_.scale * policy_.loss_scale_growth, policy_.max_loss_scale);
      state_.clean_updates = 0;
    }
    return false;
  }
  state_.clean_updates = 0;
  // Once hysteresis is used up every further overflow of the row shrinks the scale: a scale that is
  // far too high must come down fast.
  if (++state_.overflows_in_row < policy_.loss_scale_hysteresis) return false;
  const bool at_floor = state_.scale <= policy_.min_loss_scale;
  state_.scale = std::max(state_.scale * policy_.loss_scale_backoff, policy_.min_loss_scale);
  return at_floor;
}

void LossScaler::load(const State& state) {
  if (!std::isfinite(state.scale) || state.scale <= 0) {
    fail("precision", "saved loss scale is not a finite positive number: ", state.scale,
         "; the saved state is damaged, load another one");
  }
  if (state.clean_updates < 0 || state.overflows_in_row < 0) {
    fail("precision", "saved loss scale has negative counters: ", state.clean_updates, " and ",
         state.overflows_in_row, "; the saved state is damaged, load another one");
  }
  if (dynamic_) state_ = state;  // a static scale is the config's, not the file's
}

}  // namespace poise::precision
