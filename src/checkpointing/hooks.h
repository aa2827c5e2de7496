// The saved-tensor hooks of the calling thread: while a HookScope lives, autograd hands every
// tensor it saves to the innermost scope's hooks.
#pragma once

#include <memory>

#include "poise/checkpointing.h"

namespace poise::checkpointing {

class HookScope {
 public:
  explicit HookScope(std::shared_ptr<SavedTensorHooks> hooks);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

  // After an exception of these hooks was caught for good.
  void drop_error() { provider_.drop_error(); }

 private:
  HookProvider& provider_;
};

}  // namespace poise::checkpointing
