// One small real run of a model, and its chain.
//
// [Note: where a unit begins] torch::nn modules have no hooks around their forward. Autograd's
// hooks on saved tensors do as well: a unit's first operation with a parameter saves it, and its
// last one is the first that asks for a parameter in backward. Meters are read there.
#include "poise/module_plan.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <utility>

#include "checkpointing/hooks.h"
#include "checkpointing/replay.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise {
namespace {

constexpr double kUnit = 1e12;  // FLOPs that stand for a second of a link's forward

class Meter {
 public:
  Meter(Engine& engine, c10::Device device) : engine_(engine), device_(device) {}

  struct Reading {
    std::int64_t now = 0, peak = 0;
    double seconds = 0;  // since the last one
  };
  // Peak: highest since the last reading.
  Reading read() {
    if (!device_.is_cpu()) {  // what was queued is not yet done
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    }
    const auto books = engine_.ledger().snapshot();
    engine_.restart_peak();
    const auto before = std::exchange(clock_, Clock::now());
    return {books.current_bytes, books.peak_bytes,
            std::chrono::duration<double>(clock_ - before).count()};
  }

 private:
  using Clock = std::chrono::steady_clock;
  Engine& engine_;
  const c10::Device device_;
  Clock::time_point clock_ = Clock::now();
};

// Reads a meter where one link ends and the next begins: what comes before the units, each unit,
// what comes after them.
class Marks {
 public:
  Marks(Meter& meter, int units) : meter_(meter), units_(units) {}

  void begin_forward() { links_.push_back({.kept = meter_.read().now}); }
  // `unit`: whose parameter is saved; -1: the rest's.
  void forward_saves(int unit) {
    const auto wanted = link_of(unit), current = static_cast<int>(links_.size()) - 1;
    if (units_ == 0 || wanted == current || (unit < 0 && current < units_)) return;
    in_order_ = in_order_ && wanted == current + 1;
    if (in_order_) links_.push_back({.kept = end_link()});
  }
  void end_forward() {
    end_ = end_link();
    backward_ = static_cast<int>(links_.size()) - 1;
  }
  void backward_asks(int unit) {
    const auto wanted = link_of(unit);
    if (!in_order_ || wanted != backward_ - 1) return;
    end_backward();
    backward_ = wanted;
  }
  void end_backward() {
    const auto reading = meter_.read();
    auto& link = links_[static_cast<std::size_t>(backward_)];
    link.backward = std::max(link.backward, reading.peak);
    link.seconds += reading.seconds;
  }

  bool in_order() const { return in_order_ && static_cast<int>(links_.size()) > units_; }

  // Their passes and seconds; all as one where they were not in order.
  std::vector<plan::Link> links() const {
    if (!in_order()) return {one_link()};
    std::vector<plan::Link> made;
    for (std::size_t i = 0; i < links_.size(); ++i) {
      const auto next = i + 1 < links_.size() ? links_[i + 1].kept : end_;
      made.push_back(link_of(links_[i], next));
    }
    return made;
  }

 private:
  struct Seen {
    std::int64_t kept = 0;                   // when its forward began
    std::int64_t forward = 0, backward = 0;  // highest
    double seconds = 0;
  };

  int link_of(int unit) const { return unit < 0 ? units_ + 1 : unit + 1; }
  std::int64_t end_link() {
    const auto reading = meter_.read();
    links_.back().forward = reading.peak;
    links_.back().seconds += reading.seconds;
    return reading.now;
  }
  static plan::Link link_of(const Seen& seen, std::int64_t next) {
    plan::Link link;
    link.passes.fill({.saved = next - seen.kept,
                      .forward_peak = seen.forward - seen.kept,
                      .backward_peak = std::max<std::int64_t>(0, seen.backward - seen.kept)});
    link.flops = seen.seconds / 3 * kUnit;  // backward counts twice the forward
    return link;
  }
  plan::Link one_link() const {
    Seen all{.kept = links_.front().kept};
    for (const auto& link : links_) {
      all.forward = std::max(all.forward, link.forward);
      all.backward = std::max(all.backward, link.backward);
      all.seconds += link.seconds;
    }
    return link_of(all, end_);
  }

  Meter& meter_;
  const int units_;
  std::vector<Seen> links_;
  std::int64_t end_ = 0;
  int backward_ = 0;
  bool in_order_ = true;
};

// Saves tensors as they are and tells whose parameters they were.
class Watch : public checkpointing::SavedTensorHooks {
 public:
  Watch(Marks& marks, const std::unordered_map<const c10::StorageImpl*, int>& unit_of)
      : marks_(marks), unit_of_(unit_of) {}

  std::shared_ptr<void> pack(const at::Tensor& tensor) override {
    auto saved = std::make_shared<Saved>();
    saved->tensor = tensor.detach();
    const auto found = tensor.has_storage() ? unit_of_.find(tensor.storage().unsafeGetStorageImpl())
                                            : unit_of_.end();
    if (found != unit_of_.end()) {
      saved->is_parameter = true;
      saved->unit = found->second;
      marks_.forward_saves(saved->unit);
    }
    return saved;
  }
  at::Tensor unpack(const std::shared_ptr<void>& packed) override {
    const auto& saved = *static_cast<Saved*>(packed.get());
    if (saved.is_parameter) marks_.backward_asks(saved.unit);
    return saved.tensor;
  }

 private:
  struct Saved {
    at::Tensor tensor;
    bool is_parameter = false;
    int unit = -1;
  };
  Marks& marks_;
  const std::unordered_map<const c10::StorageImpl*, int>& unit_of_;
};

// Parameters, buffers and random state are at its end what they were.
class Unchanged {
 public:
  explicit Unchanged(const ModelView& model) : model_(model) {
    for (const auto& parameter : model.parameters) {
      parameters_.push_back(parameter.tensor.detach());
      gradients_.push_back(parameter.tensor.grad());
    }
    for (const auto& buffer : model.buffers) buffers_.push_back(buffer.tensor.detach().clone());
  }
  ~Unchanged() {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      auto tensor = model_.parameters[i].tensor;
      tensor.set_data(parameters_[i]);
      tensor.mutable_grad() = gradients_[i];
    }
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      model_.buffers[i].tensor.detach().copy_(buffers_[i]);
    }
  }
  Unchanged(const Unchanged&) = delete;
  Unchanged& operator=(const Unchanged&) = delete;

 private:
  const ModelView& model_;
  std::vector<at::Tensor> parameters_, gradients_, buffers_;
  checkpointing::RandomScope random_;
};

class Run {
 public:
  Run(const ModelView& model, const Config& config)
      : engine_(model, config), meter_(engine_, model.parameters.front().tensor.device()) {
    const auto& table = engine_.table();
    for (const auto& parameter : model.parameters) {
      const auto unit = table.entries()[static_cast<std::size_t>(table.find(parameter.name))].unit;
      unit_of_[parameter.tensor.storage().unsafeGetStorageImpl()] =
          unit == table.rest_unit() ? -1 : unit;
    }
    units_ = static_cast<int>(table.units().size()) - (table.rest_unit() >= 0 ? 1 : 0);
  }

  // The second of two runs counts: the first one warms up.
  plan::Chain chain(const SampleLoss& loss, std::int64_t samples) {
    links(loss, samples);
    plan::Chain chain{flats(), engine_.table().rest_unit(), links(loss, samples)};
    const auto& names = engine_.table().units();
    for (std::size_t i = 0; i < chain.links.size(); ++i) {
      const bool one = chain.links.size() == 1;
      const bool unit = !one && i > 0 && static_cast<int>(i) <= units_;
      auto& link = chain.links[i];
      link.name = one ? "the model" : unit ? names[i - 1] : i == 0 ? "the embedding" : "the head";
      if (unit) link.flat = static_cast<int>(i) - 1;
    }
    return chain;
  }

 private:
  std::vector<plan::Link> links(const SampleLoss& loss, std::int64_t samples) {
    Marks marks(meter_, units_);
    marks.begin_forward();
    {
      Loss made;
      {
        auto scope = engine_.forward_scope();
        const checkpointing::HookScope hooks(std::make_shared<Watch>(marks, unit_of_));
        made = loss(samples);
      }
      marks.end_forward();
      engine_.backward(made);
    }
    marks.end_backward();
    engine_.discard_window();
    return marks.links();
  }

  std::vector<plan::Flat> flats() const {
    const auto& table = engine_.table();
    std::vector<plan::Flat> flats;
    for (const auto& unit : table.units()) flats.push_back({.name = unit});
    for (const auto& flat : table.flats()) {
      auto& mine = flats[static_cast<std::size_t>(flat.unit)];
      (flat.trainable ? mine.elements : mine.frozen) += flat.numel;
    }
    for (const auto& entry : table.entries()) {
      if (!entry.trainable) continue;
      flats[static_cast<std::size_t>(entry.unit)].factored +=
          optim::factored_numel({entry.sizes, {}});
    }
    return flats;
  }

  Engine engine_;
  Meter meter_;
  std::unordered_map<const c10::StorageImpl*, int> unit_of_;
  int units_ = 0;
};

}  // namespace

namespace {

void check(const ModelView& model) {
  if (model.parameters.empty()) fail("plan", "the model has no parameters; give one that trains");
}

Config precision_alone(const config::PrecisionPolicy& precision) {
  Config config;
  config.precision = precision;
  return config;
}

void add(plan::Traced& traced, Run& run, const SampleLoss& loss, std::int64_t samples) {
  traced.micro_batches.push_back(samples);
  traced.chains.push_back(run.chain(loss, samples));
}

}  // namespace

plan::Traced trace(const ModelView& model, const SampleLoss& loss,
                   const config::PrecisionPolicy& precision,
                   const std::vector<std::int64_t>& micro_batches) {
  check(model);
  if (micro_batches.empty() || !std::is_sorted(micro_batches.begin(), micro_batches.end()) ||
      micro_batches.front() < 1) {
    fail("plan", "the sizes of sample batches must rise from at least 1; give for example {1, 2}");
  }
  const Unchanged unchanged(model);
  Run run(model, precision_alone(precision));
  plan::Traced traced;
  for (const auto samples : micro_batches) add(traced, run, loss, samples);
  return traced;
}

plan::Device measured_device(const plan::Device& like) {
  auto device = like;
  device.half_flops = device.float_flops = kUnit;
  device.efficiency = 1;
  device.half_tokens = device.overhead = 0;
  return device;
}

namespace {

constexpr std::int64_t kLargest = 64;  // samples of a run where no budget says how many
constexpr double kShare = 0.9;         // of the budget that the largest run may be said to hold

plan::Job bare_job(const Config& config, int ranks) {
  plan::Job job;
  job.model.name = "the model";
  job.machine = plan::read_machine(join(ranks, "xCPU"));
  job.machine.device = measured_device(job.machine.device);
  job.sequence = 1;
  job.global_batch = config.batch.global_batch_size;
  job.micro_batch = config.batch.micro_batch_size;
  job.precision = config.precision;
  job.optimizer = config.optimizer;
  job.budget = config.memory.budget_bytes;
  job.shard_ranks = {ranks};
  if (config.zero.stage > 0) job.stages = {static_cast<int>(config.zero.stage)};
  job.offloads = {config.offload};
  return job;
}

// The largest micro-batch that two small ones say fits well; 0: none beyond them.
std::int64_t largest(const plan::Job& job) {
  const auto mine = job.global_batch / job.machine.ranks;
  const auto limit = job.budget > 0 ? mine : std::min(mine, kLargest);
  for (auto samples = limit; samples > job.traced->micro_batches.back(); --samples) {
    if (mine % samples != 0) continue;
    plan::Choice choice;
    choice.micro_batch = samples;
    choice.offload = job.offloads.front();
    const auto need = plan::memory(plan::chain(job, choice), choice, plan::widths(job)).peak;
    if (job.budget == 0 || static_cast<double>(need) <= kShare * static_cast<double>(job.budget)) {
      return samples;
    }
  }
  return 0;
}

}  // namespace

plan::Job plan_job(const ModelView& model, const SampleLoss& loss, const Config& config,
                   int ranks) {
  check(model);
  if (config.batch.global_batch_size < 1) {
    fail("plan", "batch.global_batch_size is ", config.batch.global_batch_size,
         "; a plan needs the samples of an update");
  }
  auto job = bare_job(config, ranks);
  const Unchanged unchanged(model);
  Run run(model, precision_alone(config.precision));
  job.traced.emplace();
  const auto mine = job.global_batch / ranks;
  for (const std::int64_t samples : {1, 2}) {
    if (samples == 1 || samples < mine) add(*job.traced, run, loss, samples);
  }
  if (const auto samples = largest(job); samples > 0) add(*job.traced, run, loss, samples);
  return job;
}

}  // namespace poise
