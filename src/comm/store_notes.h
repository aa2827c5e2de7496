// Notes in a c10d store, over a connection of their own that is made when the first is left or
// read. A store that does not answer for 10 s, because its host was stopped, is an Error.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "comm/c10d_calls.h"

namespace poise::comm {

class StoreNotes {
 public:
  explicit StoreNotes(c10d_calls::StorePtr store) : store_(std::move(store)) {}  // null: no peers'

  void leave(const std::string& key, const std::string& text);
  std::optional<std::string> find(const std::string& key);

 private:
  template <class Question>
  auto ask(Question question);

  const c10d_calls::StorePtr store_;
  std::mutex mutex_;  // one question at a time
  c10d_calls::StorePtr connection_;
};

}  // namespace poise::comm
