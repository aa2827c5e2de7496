// Two numbers for each collective.
#include "zero/following.h"

#include <ATen/ops/empty.h>

namespace poise::zero {

at::Tensor Following::broadcast(Said said, bool wait) {
  auto numbers = at::empty({2}, at::kLong);
  auto* values = numbers.mutable_data_ptr<std::int64_t>();
  values[0] = static_cast<std::int64_t>(said.operation);
  values[1] = said.index;
  numbers = numbers.to(group_.device());
  const auto event = group_.broadcast(numbers, *leader_, "what comes next");
  if (wait) event.wait();
  return numbers;
}

void Following::say(Operation operation, int index) {
  if (leader_) broadcast({operation, index}, /*wait=*/false);
}

Following::Said Following::listen() {
  const auto numbers = broadcast({}, /*wait=*/true).cpu();
  const auto* values = numbers.const_data_ptr<std::int64_t>();
  return {static_cast<Operation>(values[0]), static_cast<int>(values[1])};
}

}  // namespace poise::zero
