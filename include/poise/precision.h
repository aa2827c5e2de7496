// Low precision: the autocast guard around forward, and the dynamic loss scale of fp16.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "poise/config.h"
#include "poise/export.h"

namespace poise::precision {

POISE_API c10::ScalarType scalar_type(config::DType dtype);

// Turns torch's autocast on for one device type on this thread, with its weight cache off (the
// cache goes stale when a parameter's storage is rewritten); restores everything when it goes.
class POISE_API AutocastGuard {
 public:
  // nullopt: leaves autocast as it is.
  AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool active_ = false;
  bool enabled_ = false;
  bool cache_ = false;
  c10::ScalarType dtype_ = c10::ScalarType::Float;
};

// What autocast a forward of this policy runs under: nullopt for fp32 or where it is switched off.
POISE_API std::optional<c10::ScalarType> autocast_dtype(const config::PrecisionPolicy& policy);

// The loss scale: grows by `growth` after `growth_interval` updates without overflow, shrinks by
// `backoff` after `hysteresis` overflows in a row (and at each further one of that row), stays
// within [min, max]. Dynamic only where the dtype is fp16 and `loss_scale` is 0; without fp16 it
// is 1. Scales are exact where growth and backoff are powers of two. (Micikevicius et al. 2018,
// arXiv:1710.03740, section 3.2.)
class POISE_API LossScaler {
 public:
  explicit LossScaler(const config::PrecisionPolicy& policy);

  double scale() const { return state_.scale; }
  bool dynamic() const { return dynamic_; }

  // Called once per window: `overflow` whether its gradients had an inf or NaN.
  // Returns whether the scale is already at its floor and overflowed again (a static scale: false).
  bool update(bool overflow);

  struct State {
    double scale = 1;
    std::int64_t clean_updates = 0;  // since the last change of the scale
    std::int64_t overflows_in_row = 0;
  };
  State state() const { return state_; }
  // Throws Error on a scale that is not finite and positive. A static scale stays as configured.
  void load(const State& state);

 private:
  config::PrecisionPolicy policy_;
  bool dynamic_ = false;
  State state_;
};

}  // namespace poise::precision
