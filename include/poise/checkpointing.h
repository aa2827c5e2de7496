// Recomputing activations: the same outputs and gradients with less kept between forward and
// backward. Non-reentrant (saved-tensor hooks): each parameter's gradient hook runs once, keyword
// and nested inputs, frozen inputs and early stop work, and it nests with torch's own checkpoint.
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
#include "poise/offload.h"

namespace poise::checkpointing {

// What a recomputed region does beyond recomputing.
struct Options {
  // Buffers that `forward` updates (running statistics of batch norms): the second run leaves them
  // as it found them. `module->buffers()` will do.
  std::vector<at::Tensor> buffers = {};
  // Selective: outputs of kept_linear() and kept_attention() stay from the first run, all else is
  // recomputed.
  enum class Keep { nothing, marked } keep = Keep::nothing;
};

// Runs `forward` now and again in backward, keeping only its inputs, what it captured and its
// outputs. The random state of the CPU (and the current CUDA device), autocast and grad mode are
// replayed; where recompute saves other tensors than forward did (count, shape, dtype), backward
// throws Error. `forward` must not change state outside; where it does, ask recomputing() first.
// Nested regions free what lies between them if it is handed in as `inputs`; what a closure
// captured stays. Without grad mode `forward` simply runs.
using Tensors = std::vector<at::Tensor>;
POISE_API Tensors recompute(std::function<Tensors(const Tensors&)> forward, const Tensors& inputs,
                            Options options = {});
POISE_API Tensors recompute(std::function<Tensors()> forward, Options options = {});
POISE_API at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> forward,
                               const at::Tensor& input, Options options = {});

// Whether the calling thread is inside the second run of a recompute().
POISE_API bool recomputing();

// x through all units; those with a flag are recomputed, each as a region of its own.
POISE_API at::Tensor sequential(
    const std::vector<std::function<at::Tensor(const at::Tensor&)>>& units,
    const std::vector<bool>& flags, at::Tensor x, const Options& options = {});

// at::linear and at::scaled_dot_product_attention (no mask, no dropout), same bits. In a region
// with Keep::marked their outputs stay from the first run. Attention is kept where the CPU's fused
// kernel applies; elsewhere it is recomputed.
POISE_API at::Tensor kept_linear(const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias);
enum class Mask { none, causal };
POISE_API at::Tensor kept_attention(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, Mask mask);

// Which of `units` (names in forward order) the policy recomputes: one flag each. every_n: units n,
// 2n and so on, counted from 1; sqrt: all but about sqrt(count) evenly spread ones, the last among
// them; first_m: the first n; list: shell patterns; selective: all, with Keep::marked. Throws Error
// on an unknown policy, an n that fits no unit, or a pattern that matches none.
POISE_API std::vector<bool> recomputed_units(const config::CheckpointingPolicy& policy,
                                             const std::vector<std::string>& units);
// Which of `units` a pattern (* and ? allowed) matches; throws Error where one matches none.
POISE_API std::vector<bool> matching_units(const std::vector<std::string>& patterns,
                                           const std::vector<std::string>& units);

// Sum of cross-entropy over rows without ever holding all logits: projection and loss run by chunks
// of `chunk_tokens` rows, recomputed in backward. hidden [tokens, width], weight [classes, width],
// bias [classes] or undefined, targets int64 [tokens]; rows whose target is `ignore_index` count 0.
// Returns {loss_sum (fp32 scalar; fp64 for fp64 logits), counted (int64 scalar)}. Logits are
// computed in the dtype autocast gives, softmax in fp32. A target outside the classes throws Error.
struct LossSum {
  at::Tensor loss_sum;
  at::Tensor counted;
};
POISE_API LossSum chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& bias, const at::Tensor& targets,
                                        std::int64_t chunk_tokens,
                                        std::int64_t ignore_index = -100);

// What autograd saves for backward waits in a store of the offload room instead of on the device:
// on its way out while forward goes on, back ahead of backward. Tensors of fewer than `min_bytes`,
// what shares memory with `stay` (parameters, buffers), and tensors that do not fill their memory
// stay. Same bits. Throws Error (in forward) where the store has no room, (in backward) where a
// saved tensor was changed in place.
class POISE_API ActivationOffload {
 public:
  ActivationOffload(std::shared_ptr<offload::Store> store, std::int64_t min_bytes,
                    const std::vector<at::Tensor>& stay);
  // Runs `forward`, the unit to be offloaded.
  Tensors operator()(const std::function<Tensors(const Tensors&)>& forward,
                     const Tensors& inputs) const;
  // The same for what this thread runs until the result goes; scopes of one thread nest.
  std::shared_ptr<void> scope() const;

 private:
  struct Books;
  class Hooks;
  std::shared_ptr<Books> books_;
};

// How saved-tensor hooks reach autograd. A pure C++ process needs nothing: the first recompute()
// installs an engine that asks for them. A Python process must not replace its engine, so the
// binding registers a provider at import.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  // Keeps what unpack needs. Throws EverythingRecomputed to leave a second run early.
  virtual std::shared_ptr<void> pack(const at::Tensor& tensor) = 0;
  virtual at::Tensor unpack(const std::shared_ptr<void>& packed) = 0;
};
// Not a std::exception, so that handlers in user code let it pass. (In a Python process it reaches
// C++ as torch's python_error, which is one: let that pass where recomputing() says so.)
struct POISE_API EverythingRecomputed {};
class HookProvider {
 public:
  virtual ~HookProvider() = default;
  virtual void push(std::shared_ptr<SavedTensorHooks> hooks) = 0;  // for this thread
  virtual void pop() = 0;
  // A second run was left early by an exception of pack() that nobody will see: where a language
  // keeps a pending error of its own beside it, that one goes too.
  virtual void drop_error() {}
};
POISE_API void set_hook_provider(HookProvider* provider);  // the caller keeps it alive for ever

}  // namespace poise::checkpointing
