// Recomputing activations: the same outputs and gradients with less kept between forward and
// backward. Non-reentrant (saved-tensor hooks): each parameter's gradient hook runs once, keyword and
// nested inputs, frozen inputs and early stop work, and it nests with torch's own checkpoint.
// (Chen et al. 2016, arXiv:1604.06174.)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "poise/config.h"
#include "poise/export.h"

namespace poise::checkpointing {

// Runs `forward` now and again in backward, keeping only what it captured and its outputs. The random
// state of the CPU (and the current CUDA device), autocast and grad mode are replayed; where
// recompute saves other tensors than forward did (count, shape, dtype), backward throws Error.
// `forward` must not change state outside (batch norms of torch::nn::BatchNorm* are handled by
// recomputing(): ask it before updating statistics of your own).
POISE_API std::vector<at::Tensor> recompute(std::function<std::vector<at::Tensor>()> forward);
POISE_API at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> forward, const at::Tensor& input);

// Whether the calling thread is inside the second run of a recompute().
POISE_API bool recomputing();

// Which of `units` (names in forward order) the policy recomputes: one flag each. Throws Error on an
// unknown policy or a pattern of `list` that matches no unit.
POISE_API std::vector<bool> recomputed_units(const config::CheckpointingPolicy& policy,
                                             const std::vector<std::string>& units);

// Sum of cross-entropy over rows without ever holding all logits: projection and loss run by chunks
// of `chunk_tokens` rows, recomputed in backward. hidden [tokens, width], weight [classes, width],
// bias [classes] or undefined, targets int64 [tokens]; rows whose target is `ignore_index` count 0.
// Returns {loss_sum (fp32 scalar), counted (int64 scalar)}. The logits are computed in the dtype autocast gives and summed in fp32.
struct LossSum {
  at::Tensor loss_sum;
  at::Tensor counted;
};
POISE_API LossSum chunked_cross_entropy(const at::Tensor& hidden,
                                        const at::Tensor& weight,
                                        const at::Tensor& bias,
                                        const at::Tensor& targets,
                                        std::int64_t chunk_tokens,
                                        std::int64_t ignore_index = -100);

// How saved-tensor hooks reach autograd. A pure C++ process needs nothing: the first recompute()
// installs an engine that asks for them. A Python process must not replace its engine, so the binding
// registers a provider at import.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  virtual std::shared_ptr<void> pack(const at::Tensor& tensor) = 0;   // keeps what unpack needs
  virtual at::Tensor unpack(const std::shared_ptr<void>& packed) = 0;
};
class HookProvider {
 public:
  virtual ~HookProvider() = default;
  virtual void push(std::shared_ptr<SavedTensorHooks> hooks) = 0;  // for this thread
  virtual void pop() = 0;
};
POISE_API void set_hook_provider(HookProvider* provider);  // the caller keeps it alive for ever

}  // namespace poise::checkpointing
