// What a plan costs.
#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {

Cost cost(const Plan& plan, double tokens, const Price& price) {
  if (!(price.gpu_hour >= 0) || !(price.utilisation > 0 && price.utilisation <= 1)) {
    fail("plan", "a price of ", price.gpu_hour, " an hour at a utilisation of ", price.utilisation,
         "; give a price of at least 0 and a utilisation above 0, at most 1");
  }
  constexpr double kHours = 730;  // of a month
  const double hour = plan.choice.ranks * price.gpu_hour;
  const double hours = 1e9 / tokens * plan.time.total / 3600 / price.utilisation;
  return {.month = kHours * hour, .billion_tokens = hours * hour};
}

}  // namespace poise::plan
