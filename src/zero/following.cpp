// Two numbers for each collective.
#include "zero/following.h"

#include <ATen/ops/empty.h>

namespace poise::zero {

Following::Word Following::broadcast(Said said) {
  auto numbers = at::empty({2}, at::kLong);
  auto* values = numbers.mutable_data_ptr<std::int64_t>();
  values[0] = static_cast<std::int64_t>(said.operation);
  values[1] = said.index;
  numbers = numbers.to(group_.device());
  const auto sent = group_.broadcast(numbers, *leader_, "what comes next");
  return {numbers, sent};
}

void Following::set_leader(std::optional<int> rank) {
  for (const auto& word : words_) word.sent.wait();
  words_.clear();
  leader_ = rank;
}

void Following::say(Operation operation, int index) {
  if (leader_) words_.push_back(broadcast({operation, index}));
}

Following::Said Following::listen() {
  const auto word = broadcast({});
  word.sent.wait();
  word.sent.synchronize();
  const auto numbers = word.numbers.cpu();
  group_.check();  // on a GPU a failed group's broadcast ends without a word
  const auto* values = numbers.const_data_ptr<std::int64_t>();
  return {static_cast<Operation>(values[0]), static_cast<int>(values[1])};
}

}  // namespace poise::zero
