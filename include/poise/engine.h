// The engine: one update of a model from a window of micro-batches, whatever the split, precision
// and recomputation. The only room that knows the order of a step (docs/dataflow.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "poise/checkpointing.h"
#include "poise/comm.h"
#include "poise/config.h"
#include "poise/core.h"
#include "poise/export.h"
#include "poise/memory.h"
#include "poise/optim.h"
#include "poise/state.h"
#include "poise/zero.h"

namespace poise {

// What a forward hands back.
struct POISE_API Loss {
  enum class Kind {
    mean,       // scalar: a mean over `count` tokens (or samples)
    sum,        // scalar: a sum over `count` tokens
    per_token,  // any shape: summed here; count is numel unless given
  };
  // A further term with a denominator of its own, weighted by `weight`.
  struct Term {
    at::Tensor value;
    Kind kind = Kind::mean;
    at::Tensor count;  // 0-dim; undefined: not given
    double weight = 1;
  };

  at::Tensor value;
  Kind kind = Kind::mean;
  at::Tensor count;  // 0-dim number of counted tokens, any device; undefined: not given
  std::vector<Term> terms;

  Loss() = default;
  Loss(at::Tensor value) : value(std::move(value)) {}  // NOLINT: a plain scalar is a mean
  static Loss mean(at::Tensor value, double count);
  static Loss mean(at::Tensor value, at::Tensor count);
  static Loss sum(at::Tensor value, double count);
  static Loss sum(at::Tensor value, at::Tensor count);
  static Loss per_token(at::Tensor values);
};

enum class Last { no, yes };

// A trainable parameter whose requires_grad is false as a window opens is frozen for that window:
// the update leaves it alone. The same on all ranks; a change within a window is an Error.
// Thread rules: one thread drives an engine; backward may run on autograd's threads.
class POISE_API Engine {
  struct Impl;

 public:
  using LossFn = std::function<Loss(std::size_t micro_batch)>;
  // Fills the parameters of a unit, which have sizes but no memory (their storage has 0 bytes)
  // until then. Called on rank 0 alone, unit by unit in canonical order, each time before the
  // unit's values move into the engine, so that no rank ever holds the whole model.
  using Materialize = std::function<void(const std::string& unit)>;

  // Re-homes the model's parameters into memory the engine owns (same tensors, names, ties, shapes)
  // and casts them to config.precision.parameters; masters are made from the values before the
  // cast. Throws Error: no trainable parameter, overlapping parameters, several devices, a hook on
  // a parameter that cannot be honoured. Where it throws, whatever for, parameters and buffers are
  // in the type, on the device and of the values that they had, but for `.grad`; of several ranks
  // each has rank 0's values, and what no rank had whole is lost, which a parameter says when it is
  // touched.
  // `group`: the ranks that train together, each with an Engine of the same model and settings
  // (else Error); all take rank 0's parameters and buffers. Null: one rank. Calls marked "all
  // ranks" must then be made by all of them, in the same order. A failure on one rank ends the
  // group: every rank's next wait throws its message.
  // `materialize`: for a model whose parameters were made without memory.
  Engine(const ModelView& model, const Config& config, std::shared_ptr<comm::Group> group = {},
         const Materialize& materialize = {});
  // Sharded inside smaller groups, replicated across them. Throws Error where they do not fit.
  Engine(const ModelView& model, const Config& config, comm::Ranks ranks,
         const Materialize& materialize = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // One update from `count` micro-batches (all ranks; counts may differ, and be 0 on some).
  // `counts`, needed only by losses with several terms: the window's total count of the main loss
  // and of each term. An exception from `loss` keeps its type and discards the window; the engine
  // stays usable, on one rank: it ends a group.
  // Where forward or backward run out of memory on some ranks, the others end the window without
  // them, and step throws torch's OutOfMemoryError on all ranks. Nothing has changed then, and
  // engine and group stay usable: the window may be run again, in smaller micro-batches.
  StepResult step(std::size_t count, const LossFn& loss, const std::vector<double>& counts = {});

  // The same over a range of batches: loss(batch) -> Loss or Tensor.
  template <class Window, class Fn>
  requires requires(Window& range) { std::begin(range); }
  StepResult step(Window&& window, Fn&& loss) {
    auto it = std::begin(window);
    const auto count = static_cast<std::size_t>(std::distance(it, std::end(window)));
    return step(count, [&](std::size_t) { return Loss(loss(*it++)); });
  }

  // The three-call form. Forward runs under forward_scope(); backward() accumulates; step() closes
  // the window (an error off the boundary unless Last::yes, which closes a partial window). A
  // forward with gradients switched off is an evaluation and belongs to no window.
  //
  // A forward that throws leaves the window as it was, and may be run again; but where ranks gather
  // parameters for each other (zero.stage 3), it ends the group: they would wait for it.
  //
  // Where backward() runs out of memory on some of several ranks, it ends there with the window,
  // once the others have come to its end: their step() or begin_update() throws OutOfMemoryError
  // too, and all may run the window again. lose_window() does the same for a forward.
  class POISE_API ForwardScope {
   public:
    ForwardScope(ForwardScope&&) noexcept;
    ~ForwardScope();
    // For callers whose exceptions are none of C++: the forward failed, and the scope with it.
    void fail(const std::string& why) noexcept;
    // The same of one that ran out of memory: lose_window() where the others wait for its gathers.
    void lose(const std::string& why);

   private:
    friend class Engine;
    struct Impl;
    explicit ForwardScope(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };
  ForwardScope forward_scope();
  // Takes what forward saves to where offload.activations says, for a model that chooses where: its
  // scope() is around the units of offload.activation_units. Empty: it stays on the device.
  std::optional<checkpointing::ActivationOffload> activation_offload() const;
  void begin_window(const std::vector<double>& counts);  // only for losses with several terms
  void backward(const Loss& loss);
  bool is_boundary() const;  // the window holds as many micro-batches as config says
  StepResult step(Last last = Last::no);
  void discard_window();  // drops what was accumulated since the last step
  // This rank cannot go on with the open window, since a forward ran out of memory: the window is
  // dropped on all ranks. Waits for the others to come to its end. One rank: discard_window().
  void lose_window(const std::string& why);
  // The same without a failure: throws WindowDropped on all ranks, from their backward(),
  // begin_update() or step(), or OutOfMemoryError where another rank lost the window. On one rank,
  // too.
  [[noreturn]] void drop_window();
  std::int64_t lost_windows() const;  // dropped on all ranks, whoever began it

  // Optional, before step(): sums and statistics of the window. After it gradient(name) is the mean
  // unscaled unclipped gradient, fp32, a copy that may be written: step() then takes it back and
  // makes norm and flags anew. All ranks; over several they must write the same.
  void begin_update();
  at::Tensor gradient(const std::string& name);

  // For a loop that keeps settings of its own, as a torch optimizer with its schedulers does.
  // Between windows, the same on all ranks.
  //
  // Micro-batches of a full window from now on, instead of those that config says.
  void set_accumulation(std::int64_t micro_batches);
  // Micro-batches of the next full window on a rank: of a ramp, by applied updates.
  std::int64_t accumulation() const;
  // Each group's parameters by name; every trainable one is in one of them (else Error). Learning
  // rates and decay come from set_hyperparameters() from now on, not from config and schedule.
  void group_parameters(const std::vector<std::vector<std::string>>& groups);
  struct OptimizerConstants {
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double momentum = 0;  // sgd
  };
  // Of the updates to come; one entry for each group.
  void set_hyperparameters(const std::vector<optim::GroupSettings>& groups,
                           const OptimizerConstants& constants);
  // The optimizer's moments of a parameter, fp32, shaped like it (moment1 and moment2 of Adam,
  // momentum of SGD), as copies. All ranks.
  std::vector<at::Tensor> moments(const std::string& name) const;
  void set_moments(const std::string& name, const std::vector<at::Tensor>& values);
  // How many updates have been applied, for bias correction and schedule.
  void set_updates(std::int64_t updates);
  // How many of them were not the parameter's, which was frozen (requires_grad) at that time.
  std::int64_t missed_updates(const std::string& name) const;
  void set_missed_updates(const std::string& name, std::int64_t updates);
  // The schedule of the updates to come, which counts those applied after the first `from`: a
  // second run of one engine begins its schedule anew, and its moments go on.
  void set_schedule(const config::SchedulePolicy& policy, std::int64_t from);

  // Clips this window's gradient to a global L2 norm, instead of config's max_grad_norm; between
  // the last backward() and step(). Returns the norm before. All ranks.
  double clip_grad_norm(double max_norm);

  // What runs a block while its parameters are whole (zero.stage 3); the blocks of a torch::nn
  // model keep one each. Throws Error on an unknown unit.
  zero::Unit unit(const std::string& name) const;

  // While it lives all parameters are whole, at every stage: to evaluate without the engine, to
  // read, to edit. With `writer` the values of that rank become everybody's at its end, and masters
  // follow. All ranks, between windows.
  class POISE_API Gathered {
   public:
    Gathered(Gathered&&) noexcept;
    ~Gathered();
    void close();  // ends it early; unlike the destructor it can throw

   private:
    friend class Engine;
    Gathered(Engine::Impl& engine, std::optional<int> writer, std::optional<int> unit);
    Engine::Impl* engine_;
    std::optional<int> writer_;
    std::optional<int> unit_;  // only this one
  };
  Gathered gathered(std::optional<int> writer = {});
  // The same of one unit's parameters alone, as they are: what goes through all units holds no more
  // than one of them whole. Throws Error on an unknown unit.
  Gathered gathered_unit(const std::string& unit);

  // Makes the model what it was before the engine, as far as nothing has changed it since: types,
  // devices, values. All ranks, between windows. The engine is of no more use then.
  void unmake();

  // Tells the engine that a parameter was edited through .data (other edits are noticed).
  void refresh(const std::string& name);

  // fp32 master of a parameter (the parameter itself where it is fp32), shaped like it, to be read.
  // All ranks; a copy where masters are sharded.
  at::Tensor master(const std::string& name) const;
  // Replaces it, and the parameter's own value with it; the same on all ranks, between windows.
  void set_master(const std::string& name, const at::Tensor& values);

  // Saves everything that the next updates depend on (masters, moments, buffers, counters, loss
  // scale, random generators) as a folder in `directory`, which all ranks see; returns its path.
  // All ranks, between windows. config.state.asynchronous: returns once what anyone may change has
  // been copied to the host (masters and moments are copied until the next update), and a failure
  // of writing comes from the next step(), save(), load() or finish_save(); the destructor waits
  // for the end of it.
  std::string save(const std::string& directory, const state::SaveOptions& options = {});
  void finish_save();

  // Writes a save to its end and removes it: what is wrong with the directory, or too large for it,
  // comes out now and not when it is needed. All ranks, between windows.
  state::Rehearsal rehearse_save(const std::string& directory);

  // Takes the state of a save, or of the latest one in a directory of saves: made on any number of
  // ranks, at any stage, in any precision, of the same model and optimizer. Everything is checked
  // before anything is touched. All ranks, between windows. Throws Error naming the file, parameter
  // or setting that does not fit, on all ranks, which may go on then.
  state::Loaded load(const std::string& path, const state::LoadOptions& options = {});

  const Config& config() const;
  const ParamTable& table() const;
  const memory::Ledger& ledger() const;
  void restart_peak();  // the ledger's peaks start anew from what is held
  comm::Group& group() const;
  double learning_rate() const;  // of the next update, group 0's multiplier 1
  double loss_scale() const;
  std::int64_t updates() const;  // applied updates (the schedule counts these)
  std::int64_t skipped_updates() const;
  std::int64_t micro_batches() const;  // in the open window

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace poise

namespace torch::nn {
class Module;
}

namespace poise {
// The view of a torch::nn module: parameters and buffers by name; units are its repeated blocks
// (the entries of the largest ModuleList or Sequential, one whose entries are of one class before
// any other) and one for the rest.
POISE_API ModelView view(const torch::nn::Module& module);
}  // namespace poise
