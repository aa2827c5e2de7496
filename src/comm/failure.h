// The first failure of a group, set by any thread and thrown by every later call.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "poise/error.h"

namespace poise::comm {

class Failure {
 public:
  void set(const std::string& message) {
    const std::lock_guard lock(mutex_);
    if (!message_) message_ = message;
  }
  bool happened() const {
    const std::lock_guard lock(mutex_);
    return message_.has_value();
  }
  void check() const {
    const std::lock_guard lock(mutex_);
    if (message_) throw Error(*message_);
  }

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> message_;
};

}  // namespace poise::comm
