// Questions to the store.
#include "comm/store_notes.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/store_answer.h"
#include "poise/error.h"

namespace poise::comm {

template <class Question>
auto StoreNotes::ask(Question question) {
  const std::lock_guard lock(mutex_);
  if (!store_) {
    fail("comm", "this process group has no store for notes between ranks; make it with one");
  }
  try {
    if (!connection_) {
      connection_ = store_answer([store = store_]() -> c10d_calls::StorePtr {
        return c10::make_intrusive<::c10d::PrefixStore>("notes", store->clone());
      });
    }
    return store_answer([connection = connection_, question] { return question(*connection); });
  } catch (const c10::Error& error) {
    fail("comm", "lost the store of the group: ", c10d_calls::message_of(error),
         "; its host, rank 0 or the launcher, has disappeared: look at its output");
  }
}

void StoreNotes::leave(const std::string& key, const std::string& text) {
  ask([key, text](::c10d::Store& notes) { notes.set(key, text); });
}

std::optional<std::string> StoreNotes::find(const std::string& key) {
  return ask([key](::c10d::Store& notes) -> std::optional<std::string> {
    if (!notes.check({key})) return std::nullopt;
    return notes.get_to_str(key);
  });
}

}  // namespace poise::comm
