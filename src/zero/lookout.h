// A thread that looks for something every so often, for as long as it lives.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace poise::zero {

class Lookout {
 public:
  // `look` throws nothing.
  Lookout(std::chrono::milliseconds period, std::function<void()> look);
  ~Lookout();  // waits for a look that goes on
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  const int generation_;  // the child of a fork has no such thread
  std::thread thread_;    // the last member: it uses the others
};

}  // namespace poise::zero
