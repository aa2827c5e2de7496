// The autocast guard around forward, and which dtype a policy runs it under.
#include <ATen/autocast_mode.h>

#include "poise/error.h"
#include "poise/precision.h"

#include "core/scalar_type.h"

namespace poise::precision {

c10::ScalarType scalar_type(config::DType dtype) { return poise::scalar_type(dtype); }

std::optional<c10::ScalarType> autocast_dtype(const config::PrecisionPolicy& policy) {
  if (policy.dtype == config::DType::fp32 || !policy.autocast) return std::nullopt;
  return scalar_type(policy.dtype);
}

// The nesting count of torch's own context manager is left alone: it only says when the weight
// cache is emptied, and while this guard lives nothing is read from that cache or put into it.
AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype)
    : device_(device) {
  if (!dtype) return;
  enabled_ = at::autocast::is_autocast_enabled(device);
  cache_ = at::autocast::is_autocast_cache_enabled();
  dtype_ = at::autocast::get_autocast_dtype(device);
  at::autocast::set_autocast_dtype(device, *dtype);
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_cache_enabled(false);
  active_ = true;
}

AutocastGuard::~AutocastGuard() {
  if (!active_) return;
  at::autocast::set_autocast_cache_enabled(cache_);
  at::autocast::set_autocast_enabled(device_, enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_);
}

}  // namespace poise::precision
