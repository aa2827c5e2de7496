// Questions to the store.
#include "comm/store_notes.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "poise/error.h"

namespace poise::comm {
namespace {

[[noreturn]] void lost(const std::exception& error) {
  fail("comm", "lost the store of the group: ", c10d_calls::message_of(error),
       "; its host, rank 0 or the launcher, has disappeared: look at its output");
}

}  // namespace

::c10d::Store& StoreNotes::connection() {
  if (!store_) {
    fail("comm", "this process group has no store for notes between ranks; make it with one");
  }
  if (!connection_) {
    connection_ = c10::make_intrusive<::c10d::PrefixStore>("notes", store_->clone());
  }
  return *connection_;
}

void StoreNotes::leave(const std::string& key, const std::string& text) {
  const std::lock_guard lock(mutex_);
  try {
    connection().set(key, text);
  } catch (const c10::Error& error) {
    lost(error);
  }
}

std::optional<std::string> StoreNotes::find(const std::string& key) {
  const std::lock_guard lock(mutex_);
  try {
    if (!connection().check({key})) return std::nullopt;
    return connection().get_to_str(key);
  } catch (const c10::Error& error) {
    lost(error);
  }
}

}  // namespace poise::comm
