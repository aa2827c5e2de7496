// Calls that may not come back.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

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

}  // namespace poise::comm
