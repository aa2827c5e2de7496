// Questions to a store over which nobody watches: its calls have no limit, and its host may have
// been stopped.
#pragma once

#include <chrono>
#include <utility>

#include "comm/apart.h"
#include "poise/error.h"

namespace poise::comm {

// What `call` hands back. Throws Error where no answer came within 10 s, as Watch does; time in
// which this process was stopped itself does not count.
template <class Call>
auto store_answer(Call call) {
  static constexpr std::chrono::seconds limit{10};
  return answer_of(std::move(call), [left = limit / kInterruptPeriod]() mutable {
    if (left-- > 0) return;
    fail("comm", "the store of the group has not answered for ", limit.count(),
         " s; its host, rank 0 or the launcher, was stopped or is out of reach: look at both");
  });
}

}  // namespace poise::comm
