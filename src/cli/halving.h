// A window that ran out of memory is run again in smaller micro-batches: where the split was found,
// and not given, it may still turn out too large.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "poise/data.h"
#include "poise/engine.h"

namespace poise::cli {

// No sample is lost or seen twice: an engine drops such a window as if it had not begun, on all
// ranks, and the generators of random numbers go back to where it did. What was halved stays so.
// The micro-batches of all ranks are of one size, and the model has no buffers that a forward
// changes.
class Halving {
 public:
  // The engine outlives it. `note` is told what happened, on every rank.
  Halving(Engine& engine, std::function<void(const std::string&)> note)
      : engine_(engine), note_(std::move(note)) {}

  // As Engine::step(). Where single samples do not fit, their OutOfMemoryError stands.
  StepResult step(const std::vector<data::Batch>& window,
                  const std::function<Loss(const data::Batch&)>& loss);

  std::int64_t parts() const { return parts_; }  // of every micro-batch

 private:
  Engine& engine_;
  std::function<void(const std::string&)> note_;
  std::int64_t parts_ = 1;
};

}  // namespace poise::cli
