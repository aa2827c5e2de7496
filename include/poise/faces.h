// Four small classes over one engine, each with one concern: the window, precision, recomputation,
// sharding. They add nothing to what the engine does; they are other names for it, the same as in
// Python (poise.GradientAccumulationSystem and so on).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "poise/checkpointing.h"
#include "poise/comm.h"
#include "poise/config.h"
#include "poise/core.h"
#include "poise/engine.h"
#include "poise/error.h"

namespace poise {

namespace faces {

// fp16 alone has a loss scale; 0: dynamic. Throws Error where another type is given one.
inline config::PrecisionPolicy precision(config::DType dtype, double loss_scale) {
  if (loss_scale != 0 && dtype != config::DType::fp16) {
    fail("faces", "loss_scale is ", loss_scale, ", but only fp16 has one; leave it out");
  }
  config::PrecisionPolicy policy;
  policy.dtype = dtype;
  policy.loss_scale = loss_scale;
  return policy;
}

// Holds the engine that over() makes.
class OverEngine {
 public:
  Engine& engine() const {
    if (!engine_) fail("faces", "there is no model yet; call over() first");
    return *engine_;
  }

 protected:
  void make(const ModelView& model, const Config& config, std::shared_ptr<comm::Group> group) {
    config.validate();
    engine_ = std::make_unique<Engine>(model, config, std::move(group));
  }

 private:
  std::unique_ptr<Engine> engine_;
};

}  // namespace faces

// Recomputes blocks in backward instead of keeping what they made (Chen et al. 2016).
class ActivationCheckpoint {
 public:
  using Block = std::function<at::Tensor(const at::Tensor&)>;

  // Every so many blocks. Throws Error below 1.
  explicit ActivationCheckpoint(std::int64_t checkpoint_every_n = 1) : every_(checkpoint_every_n) {
    if (every_ < 1) fail("faces", "checkpoint_every_n is ", every_, "; give 1 or more");
  }

  // Turns it on, unless what is needed (peak bytes without recomputation; 0: not known) is known to
  // fit. Returns whether it is on.
  bool enable_if_needed(std::int64_t needed_bytes = 0, std::int64_t budget_bytes = 0) {
    const bool fits = needed_bytes > 0 && needed_bytes <= budget_bytes;
    enabled_ = enabled_ || !fits;
    return enabled_;
  }
  void disable() { enabled_ = false; }
  bool enabled() const { return enabled_; }

  // Block number `index` (from 0) of the model: recomputed where that is on and its turn.
  at::Tensor block(std::int64_t index, const Block& forward, const at::Tensor& input) const {
    return enabled_ && (index + 1) % every_ == 0 ? recompute(forward, input) : forward(input);
  }
  // Whatever is on.
  at::Tensor recompute(const Block& forward, const at::Tensor& input) const {
    return checkpointing::recompute(forward, input);
  }

 private:
  std::int64_t every_;
  bool enabled_ = false;
};

// Of a GradientAccumulationSystem.
struct AccumulationConfig {
  std::int64_t micro_batch_size = 1;          // samples, as the iterator gives them
  std::int64_t accumulation_steps = 1;        // micro-batches of a window
  bool gradient_checkpointing = false;        // the model's blocks go through checkpoint()
  config::DType dtype = config::DType::fp32;  // of the forward
  double loss_scale = 0;                      // fp16: a fixed one; 0: dynamic
  std::int64_t checkpoint_interval = 1;       // every so many blocks are recomputed
  std::int64_t zero_stage = 0;                // 0 to 3
  config::OffloadPolicy offload_config;
};

// Windows of micro-batches.
class GradientAccumulationSystem : public faces::OverEngine {
 public:
  explicit GradientAccumulationSystem(const AccumulationConfig& config)
      : config_(config), checkpoint_(config.checkpoint_interval) {
    if (config.accumulation_steps < 1) {
      fail("faces", "accumulation_steps is ", config.accumulation_steps,
           "; a window has 1 micro-batch or more");
    }
    if (config.gradient_checkpointing) checkpoint_.enable_if_needed();
  }

  // Makes the engine of a model. `settings`: optimizer, schedule and all that AccumulationConfig
  // does not say; `group`: the ranks that train together, null: one.
  GradientAccumulationSystem& over(const ModelView& model, Config settings = {},
                                   std::shared_ptr<comm::Group> group = {}) {
    settings.batch.micro_batch_size = config_.micro_batch_size;
    settings.batch.accumulation = config_.accumulation_steps;
    settings.precision = faces::precision(config_.dtype, config_.loss_scale);
    settings.zero.stage = config_.zero_stage;
    settings.offload = config_.offload_config;
    make(model, settings, std::move(group));
    return *this;
  }

  // One update from the next micro-batches of [data, end), which `data` then stands behind: the
  // mean loss over the tokens (or samples) of its window. Where fewer are left than a window has,
  // the window is short; without any there is no update, and nothing is returned. `loss`: as for
  // Engine::step, of what the iterator points to.
  template <class Iterator, class End, class Fn>
  std::optional<double> core_operation(Iterator& data, const End& end, Fn&& loss) {
    std::vector<std::decay_t<decltype(*data)>> window;
    const auto full = static_cast<std::size_t>(config_.accumulation_steps);
    for (; window.size() < full && data != end; ++data) window.push_back(*data);
    if (window.empty()) return std::nullopt;
    last_result_ = engine().step(window, std::forward<Fn>(loss));
    return last_result_.loss;
  }

  const AccumulationConfig& config() const { return config_; }
  const ActivationCheckpoint& checkpoint() const { return checkpoint_; }
  const StepResult& last_result() const { return last_result_; }

 private:
  AccumulationConfig config_;
  ActivationCheckpoint checkpoint_;
  StepResult last_result_;
};

// A forward in 16 bits, fp32 masters, a loss scale in fp16 (Micikevicius et al. 2017).
class MixedPrecisionTrainer : public faces::OverEngine {
 public:
  // loss_scale: fp16: a fixed one; 0: dynamic.
  explicit MixedPrecisionTrainer(config::DType dtype = config::DType::bf16, double loss_scale = 0)
      : precision_(faces::precision(dtype, loss_scale)) {}

  // Nothing is clipped but by clip_grad_norm().
  MixedPrecisionTrainer& over(const ModelView& model, Config settings = {},
                              std::shared_ptr<comm::Group> group = {}) {
    settings.precision = precision_;
    settings.optimizer.max_grad_norm = 0;
    make(model, settings, std::move(group));
    return *this;
  }

  // Around the forward.
  [[nodiscard]] Engine::ForwardScope autocast() const { return engine().forward_scope(); }
  // Scaled, accumulated in fp32.
  void backward(const Loss& loss) const { engine().backward(loss); }
  // The norm before; the gradient is unscaled first.
  double clip_grad_norm(double max_norm) const { return engine().clip_grad_norm(max_norm); }
  // The update, unless a gradient overflowed, and then the next loss scale.
  StepResult update_scale() const { return engine().step(Last::yes); }
  double loss_scale() const { return engine().loss_scale(); }

 private:
  config::PrecisionPolicy precision_;
};

// An optimizer whose states (stage 1), gradients (2) and parameters (3) are sharded over ranks
// (Rajbhandari et al. 2019, arXiv:1910.02054).
class ZeROOptimizer : public faces::OverEngine {
 public:
  explicit ZeROOptimizer(std::int64_t stage = 0, config::OffloadPolicy offload_config = {})
      : stage_(stage), offload_(std::move(offload_config)) {}

  ZeROOptimizer& over(const ModelView& model, Config settings = {},
                      std::shared_ptr<comm::Group> group = {}) {
    settings.zero.stage = stage_;
    settings.offload = offload_;
    make(model, settings, std::move(group));
    return *this;
  }

  // Drops what the open window has accumulated; after an update there is nothing to zero.
  void zero_grad() const { engine().discard_window(); }
  // The window's sums over all ranks, each rank's part with it; step() does it otherwise.
  void reduce_scatter_gradients() const { engine().begin_update(); }
  // While it lives all parameters are whole.
  [[nodiscard]] Engine::Gathered gather_parameters() const { return engine().gathered(); }
  StepResult step() const { return engine().step(Last::yes); }

 private:
  std::int64_t stage_;
  config::OffloadPolicy offload_;
};

}  // namespace poise
