// Texts by key that ranks leave for each other: in this process, or in the store of a launch.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace poise::comm {

// Of threads of one process.
class Notes {
 public:
  void leave(const std::string& key, const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts_[key] = text;
  }
  std::optional<std::string> find(const std::string& key) const {
    const std::lock_guard lock(mutex_);
    const auto found = texts_.find(key);
    return found == texts_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string> texts_;
};

}  // namespace poise::comm
