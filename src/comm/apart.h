// Calls that may not come back.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "poise/interrupt.h"

namespace poise::comm {

// What `call` hands back, from a thread that can be left alone with it. `call` holds all it uses.
template <class Call>
auto apart(Call call) {
  std::packaged_task<decltype(call())()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

template <class Result>
bool is_over(const std::future<Result>& result) {
  return result.wait_for(std::chrono::milliseconds(0)) == std::future_status::ready;
}

// What `call` hands back or throws. `look` is called while that is awaited; what it throws leaves
// the call alone.
template <class Call, class Look>
auto answer_of(Call call, Look look) {
  auto result = apart(std::move(call));
  while (result.wait_for(kInterruptPeriod) != std::future_status::ready) look();
  return result.get();
}

}  // namespace poise::comm
