// Learning rates as pure functions of the update count, with the values of transformers' schedules
// of the same names (transformers/optimization.py). poise adds a floor to all that fall.
#include <algorithm>
#include <cmath>

#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {
namespace {

constexpr double kPi = 3.14159265358979323846;

// inverse_sqrt without warmup falls from here on, as in transformers.
constexpr double kDefaultTimescale = 10000;

double divided(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(std::max<std::int64_t>(1, whole));
}

// From 1 at progress 0 to 0 at progress 1.
double half_cosine(double progress) { return 0.5 * (1.0 + std::cos(kPi * progress)); }

double above_floor(double factor, double floor) { return factor * (1.0 - floor) + floor; }

double warmup_stable_decay(const config::SchedulePolicy& policy, std::int64_t applied) {
  // Its warmup starts at the floor, that of the others at zero.
  if (applied < policy.warmup_updates) {
    return above_floor(divided(applied, policy.warmup_updates), policy.min_lr_ratio);
  }
  const auto decay_start = policy.total_updates - policy.decay_updates;
  if (applied < decay_start) return 1.0;
  const double progress = std::min(1.0, divided(applied - decay_start, policy.decay_updates));
  return above_floor(half_cosine(progress), policy.min_lr_ratio);
}

double inverse_sqrt(const config::SchedulePolicy& policy, std::int64_t applied) {
  const double warmup = static_cast<double>(policy.warmup_updates);
  const double timescale = policy.warmup_updates > 0 ? warmup : kDefaultTimescale;
  const double shifted = static_cast<double>(applied) + timescale - warmup;
  return std::max(policy.min_lr_ratio, 1.0 / std::sqrt(shifted / timescale));
}

}  // namespace

double batch_multiplier(const config::OptimizerPolicy& policy, std::int64_t samples) {
  if (policy.lr_scaling == "none") return 1.0;
  if (samples < 1 || policy.lr_batch_size < 1) {
    fail("optim", "lr_scaling ", policy.lr_scaling, " for ", samples, " samples, with an lr for ",
         policy.lr_batch_size, "; both are 1 or more");
  }
  const double ratio = static_cast<double>(samples) / static_cast<double>(policy.lr_batch_size);
  if (policy.lr_scaling == "linear") return ratio;
  if (policy.lr_scaling == "sqrt") return std::sqrt(ratio);
  fail("optim", "unknown lr_scaling ", policy.lr_scaling, "; known: none, linear, sqrt");
}

double schedule_multiplier(const config::SchedulePolicy& policy, std::int64_t applied) {
  const auto& type = policy.type;
  const bool has_end = type != "constant" && type != "inverse_sqrt";
  if (applied < 0 || (has_end && policy.total_updates <= 0)) {
    fail("optim", "schedule ", type, " at update ", applied, " of ", policy.total_updates,
         "; it needs an update count >= 0 and schedule.total_updates > 0");
  }
  if (type == "warmup_stable_decay") return warmup_stable_decay(policy, applied);
  if (applied < policy.warmup_updates) return divided(applied, policy.warmup_updates);
  if (type == "constant") return 1.0;
  if (type == "inverse_sqrt") return inverse_sqrt(policy, applied);

  // After the end all stay where they ended.
  const double progress = std::min(
      1.0, divided(applied - policy.warmup_updates, policy.total_updates - policy.warmup_updates));
  const double floor = policy.min_lr_ratio;
  if (type == "linear") return above_floor(1.0 - progress, floor);
  if (type == "cosine" || type == "cosine_with_min_lr") {
    return above_floor(half_cosine(progress), floor);
  }
  if (type == "polynomial") return above_floor(std::pow(1.0 - progress, policy.power), floor);
  fail("optim", "unknown schedule ", type,
       "; known: constant, linear, cosine, cosine_with_min_lr, inverse_sqrt, warmup_stable_decay, "
       "polynomial");
}

}  // namespace poise::optim
