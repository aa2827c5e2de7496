// Which units a policy recomputes.
#include <fnmatch.h>

#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

using Names = std::vector<std::string>;
using Flags = std::vector<bool>;

// An n that selects nothing, or more than there is, is a mistake in the config.
size_t checked_n(const config::CheckpointingPolicy& policy, const Names& units) {
  if (policy.n < 1 || static_cast<size_t>(policy.n) > units.size()) {
    fail("checkpointing", "policy '", policy.policy, "' with n = ", policy.n, " on a model of ",
         units.size(), " units; give an n from 1 to ", units.size());
  }
  return static_cast<size_t>(policy.n);
}

Flags every_n(size_t count, size_t n) {
  Flags flags(count, false);
  for (size_t i = n; i <= count; i += n) flags[i - 1] = true;
  return flags;
}

// Keeps about sqrt(count) units, the last among them: its backward comes first, so recomputing it
// would cost time and free nothing.
Flags all_but_sqrt(size_t count) {
  size_t stride = 1;
  while (stride * stride < count) ++stride;
  Flags flags(count, true);
  for (size_t back = 0; back < count; back += stride) flags[count - 1 - back] = false;
  return flags;
}

}  // namespace

Flags matching_units(const Names& patterns, const Names& units) {
  Flags flags(units.size(), false);
  for (const auto& pattern : patterns) {
    bool matched = false;
    for (size_t i = 0; i < units.size(); ++i) {
      if (fnmatch(pattern.c_str(), units[i].c_str(), 0) != 0) continue;
      flags[i] = matched = true;
    }
    if (!matched) {
      std::string known;
      for (const auto& unit : units) known += (known.empty() ? "" : ", ") + unit;
      fail("checkpointing", "pattern '", pattern, "' matches no unit; the units are: ", known);
    }
  }
  return flags;
}

Flags recomputed_units(const config::CheckpointingPolicy& policy, const Names& units) {
  const auto& name = policy.policy;
  if (name == "none") return Flags(units.size(), false);
  if (units.empty()) {
    fail("checkpointing", "policy '", name,
         "' on a model without units; name the units or use 'none'");
  }
  if (name == "every_n") return every_n(units.size(), checked_n(policy, units));
  if (name == "sqrt") return all_but_sqrt(units.size());
  if (name == "first_m") {
    Flags flags(units.size(), false);
    for (size_t i = 0; i < checked_n(policy, units); ++i) flags[i] = true;
    return flags;
  }
  if (name == "list") {
    if (policy.units.empty()) fail("checkpointing", "policy 'list' without units; name some");
    return matching_units(policy.units, units);
  }
  if (name == "selective") return Flags(units.size(), true);
  fail("checkpointing", "unknown policy '", name,
       "'; known are none, every_n, sqrt, first_m, list, selective");
}

}  // namespace poise::checkpointing
