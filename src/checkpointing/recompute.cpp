// The doors of the room: recompute() in its forms, and a chain of units with some of them
// recomputed.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "checkpointing/frame.h"
#include "poise/error.h"

namespace poise::checkpointing {

Tensors recompute(Forward forward, const Tensors& inputs, Options options) {
  if (!at::GradMode::is_enabled()) return forward(inputs);
  return std::make_shared<Frame>(std::move(forward), inputs, std::move(options))->first_run(inputs);
}

Tensors recompute(std::function<Tensors()> forward, Options options) {
  return recompute([forward = std::move(forward)](const Tensors&) { return forward(); }, Tensors{},
                   std::move(options));
}

at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> forward, const at::Tensor& input,
                     Options options) {
  auto many = [forward = std::move(forward)](const Tensors& inputs) {
    return Tensors{forward(inputs[0])};
  };
  return recompute(std::move(many), Tensors{input}, std::move(options))[0];
}

bool recomputing() {
  for (auto* run = Run::current(); run; run = run->enclosing) {
    if (run->kind == Run::Kind::second) return true;
  }
  return false;
}

at::Tensor sequential(const std::vector<std::function<at::Tensor(const at::Tensor&)>>& units,
                      const std::vector<bool>& flags, at::Tensor x, const Options& options) {
  if (units.size() != flags.size()) {
    fail("checkpointing", "sequential() got ", units.size(), " units and ", flags.size(),
         " flags; give one flag to each unit");
  }
  for (size_t i = 0; i < units.size(); ++i) {
    x = flags[i] ? recompute(units[i], x, options) : units[i](x);
  }
  return x;
}

}  // namespace poise::checkpointing
