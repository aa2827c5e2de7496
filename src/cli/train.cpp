// The run itself: setting up, the loop, the end.
#include "cli/train.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <chrono>
#include <filesystem>

#include "cli/banner.h"
#include "cli/byte_gpt.h"
#include "cli/halving.h"
#include "cli/interrupt.h"
#include "cli/report.h"
#include "cli/run_plan.h"
#include "cli/run_state.h"
#include "cli/trace.h"
#include "poise/checkpointing.h"
#include "poise/comm.h"
#include "poise/data.h"
#include "poise/engine.h"
#include "poise/error.h"
#include "poise/window_dropped.h"
#include "state/random.h"

namespace poise::cli {
namespace {

constexpr std::int64_t kPromptBytes = 48;
constexpr double kTemperature = 0.8;

struct Corpora {
  std::shared_ptr<const data::ByteCorpus> train;
  std::shared_ptr<const data::ByteCorpus> validation;  // null: none
};

data::ByteCorpus open(const Config& config, const std::vector<std::string>& paths) {
  data::CorpusOptions options;
  options.paths = paths;
  options.suffix = config.data.suffix;
  options.sequence_length = config.model.sequence_length;
  return data::ByteCorpus(options);
}

Corpora open_corpora(const Config& config) {
  if (config.data.train.empty())
    fail("cli", "data.train is empty; give it files or folders to read");
  const auto share = [](data::ByteCorpus corpus) {
    return std::make_shared<const data::ByteCorpus>(std::move(corpus));
  };
  auto train = open(config, config.data.train);
  if (config.train.validation_batches == 0) return {share(std::move(train)), nullptr};
  if (!config.data.validation.empty()) {
    return {share(std::move(train)), share(open(config, config.data.validation))};
  }
  if (config.data.validation_fraction == 0) return {share(std::move(train)), nullptr};
  auto parts = train.split(config.data.validation_fraction);
  return {share(std::move(parts.train)), share(std::move(parts.validation))};
}

std::shared_ptr<ByteGpt> build_model(const Config& config, c10::Device device) {
  if (config.model.builtin != "byte_gpt") {
    fail("cli", "model.builtin is \"", config.model.builtin, "\"; known: byte_gpt");
  }
  auto model = std::make_shared<ByteGpt>(config.model, config.engine.seed);
  model->to(device);
  using Keep = checkpointing::Options::Keep;
  model->recompute(checkpointing::recomputed_units(config.checkpointing, model->units()),
                   config.checkpointing.policy == "selective" ? Keep::marked : Keep::nothing);
  return model;
}

std::unique_ptr<data::WindowLoader> open_loader(const Config& config,
                                                std::shared_ptr<const data::ByteCorpus> corpus,
                                                const comm::Group& group) {
  data::SamplerOptions sampler;
  sampler.seed = config.engine.seed;
  sampler.ranks = group.size();
  sampler.rank = group.rank();
  sampler.order = config.data.shuffle ? data::Order::shuffled : data::Order::sequential;
  sampler.tail = data::Tail::next_epoch;  // every update has the banner's number of tokens
  data::WindowOptions window;
  window.micro_batch_size = config::micro_batch_size(config.batch);
  window.accumulation = config::accumulation(config.batch, group.size());
  window.prefetch = config.data.prefetch;
  if (!group.device().is_cpu()) window.memory = data::Memory::pinned;
  return std::make_unique<data::WindowLoader>(std::move(corpus), sampler, window);
}

comm::Ranks join_ranks(const Config& config) {
  const auto timeout = std::chrono::duration<double>(config.comm.timeout_seconds);
  const auto place = comm::place_from_environment();
  const bool alone = !place || place->size == 1;  // nothing is sharded then
  return comm::ranks_from_environment(
      alone ? 0 : static_cast<int>(config.zero.shard_group_size),
      {.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout)});
}

data::Batch on(c10::Device device, const data::Batch& batch) {
  if (device.is_cpu()) return batch;
  const auto there = [&](const at::Tensor& tensor) {
    return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true);
  };
  return {there(batch.inputs), there(batch.targets)};
}

Balance balance(const Config& config, const comm::Group& group) {
  if (!config.balance_is_open()) return {config, {}, {}};
  return find_balance(config, group.size(), group.device());
}

// Everything of one run; the members are made in the order a run needs them.
class Run {
 public:
  Run(const Config& config, Output output)
      : interrupt_(config.state.save_every > 0),
        ranks_(join_ranks(config)),
        balance_(balance(config, *group_)),
        report_(config_, group_->rank() == 0 ? output : Output::nothing, group_->size()) {}

  int go();

 private:
  void run();
  int ended_by(int signal);
  void set_up();
  void loop();
  StepResult update(const std::vector<data::Batch>& window);
  void end_others(const std::string& why);
  void validate();
  void finish();
  std::optional<memory::Snapshot> held() const;

  InterruptScope interrupt_;
  comm::Ranks ranks_;
  const std::shared_ptr<comm::Group> group_ = ranks_.all;
  Balance balance_;
  const Config& config_ = balance_.config;
  Report report_;
  const c10::Device device_ = group_->device();
  Corpora corpora_;
  std::shared_ptr<ByteGpt> model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<data::WindowLoader> loader_;
  std::unique_ptr<RunState> state_;
  std::optional<Halving> halving_;  // where the split was found
};

void Run::set_up() {
  // Of dropout: every rank has a stream of its own.
  torch::manual_seed(config_.engine.seed + static_cast<std::uint64_t>(group_->rank()));
  report_.banner(balance_.lines);  // what was predicted, before anything of it is allocated
  corpora_ = open_corpora(config_);
  model_ = build_model(config_, device_);
  const auto model_view = view(*model_);
  report_.banner(banner(config_, model_view, *corpora_.train,
                        checkpointing::recomputed_units(config_.checkpointing, model_->units()),
                        *group_));
  engine_ = std::make_unique<Engine>(model_view, config_, ranks_);
  model_->bind(*engine_);
  loader_ = open_loader(config_, corpora_.train, *group_);
  state_ = std::make_unique<RunState>(config_, *engine_, *loader_, report_, interrupt_);
  state_->resume();
  state_->rehearse();
  if (!balance_.lines.empty()) {
    halving_.emplace(*engine_, [this](const std::string& line) { report_.note(line); });
  }
}

StepResult Run::update(const std::vector<data::Batch>& window) {
  const auto loss = [&](const data::Batch& batch) {
    interrupt_.check();
    state_->drop_if_asked();
    return model_->loss(on(device_, batch));
  };
  return halving_ ? halving_->step(window, loss) : engine_->step(window, loss);
}

void Run::end_others(const std::string& why) {
  for (const auto& group : {ranks_.all, ranks_.shard, ranks_.replica}) {
    if (group) group->abort(why);
  }
}

void Run::loop() {
  using Clock = std::chrono::steady_clock;
  Trace trace(config_.train.profile_updates,
              (std::filesystem::path(config_.train.output_dir) / "trace.json").string());
  if (state_->owes_validation()) validate();
  for (auto number = report_.updates() + 1; number <= config_.train.max_updates; ++number) {
    trace.before(number);
    const auto begin = Clock::now();
    state_->open_window();
    loader_->set_accumulation(engine_->accumulation());
    auto window = loader_->next();
    POISE_CHECK(window.has_value());  // epochs have no end here
    const auto result = update(*window);
    state_->close_window();
    report_.update(result, std::chrono::duration<double>(Clock::now() - begin).count());
    if (number == 1 && !balance_.lines.empty()) {
      report_.compared(balance_.plan, result);
    }
    if (trace.after(number)) report_.note("  trace written to " + trace.path());
    const auto every = config_.train.validate_every;
    if (every > 0 && number % every == 0 && number < config_.train.max_updates) validate();
    state_->save_if_due();
  }
  state_->save_at_end();
}

void Run::validate() {
  if (!corpora_.validation) return;
  const state::RandomUntouched random(device_);
  const at::NoGradGuard no_grad;
  model_->eval();
  state_->begin_validation();
  double sum = 0, samples = 0;
  const auto size = corpora_.validation->size(), micro = config::micro_batch_size(config_.batch);
  for (std::int64_t i = 0; i < config_.train.validation_batches && i * micro < size; ++i) {
    interrupt_.check();
    state_->leave_validation_if_asked();
    std::vector<std::int64_t> indices;
    for (auto at = i * micro; at < std::min((i + 1) * micro, size); ++at) indices.push_back(at);
    const auto scope = engine_->forward_scope();  // what is thrown in it is fatal to the group
    const auto loss = model_->loss(on(device_, corpora_.validation->batch(indices)));
    const auto count = static_cast<double>(indices.size());
    sum += loss.value.item<double>() * count;  // a mean over samples of one length
    samples += count;
  }
  model_->train();
  report_.validation(sum / samples);
  state_->validated(sum / samples);
}

void Run::finish() {
  validate();
  state_->save_if_best();
  if (config_.train.sample_bytes > 0) {
    const auto& corpus = corpora_.validation ? *corpora_.validation : *corpora_.train;
    const auto input = corpus.sample(0).input;
    std::string prompt;
    for (std::int64_t i = 0; i < std::min(kPromptBytes, input.numel()); ++i) {
      prompt += static_cast<char>(input[i].item<std::int64_t>());
    }
    const auto whole = engine_->gathered();  // only rank 0 writes
    if (group_->rank() > 0) return;
    const at::NoGradGuard no_grad;
    const auto scope = engine_->forward_scope();
    report_.sample(prompt, model_->generate(prompt, config_.train.sample_bytes, kTemperature,
                                            config_.engine.seed));
  }
}

std::optional<memory::Snapshot> Run::held() const {
  if (!engine_) return std::nullopt;
  return engine_->ledger().snapshot();
}

void Run::run() {
  try {
    set_up();
    loop();
    finish();
  } catch (const WindowDropped&) {
    state_->save_dropped();
  } catch (const Interrupted& interrupted) {
    if (state_) state_->save_at_signal(interrupted.signal);
    throw;
  }
}

int Run::go() {
  try {
    run();
    report_.finish(std::nullopt, std::nullopt);
    return 0;
  } catch (const SavedAtSignal& saved) {
    return ended_by(saved.signal);
  } catch (const Interrupted& interrupted) {
    end_others("ended by signal " + std::to_string(interrupted.signal));
    return ended_by(interrupted.signal);
  } catch (const c10::Error& error) {  // out of memory is one: the message without its backtrace
    end_others(error.what_without_backtrace());
    report_.finish(error.what_without_backtrace(), held());
    throw;
  } catch (const std::exception& error) {
    end_others(error.what());
    report_.finish(error.what(), held());
    throw;
  }
}

int Run::ended_by(int signal) {
  const auto words = "ended by signal " + std::to_string(signal);
  report_.note(words);
  report_.finish(words, held());
  return 128 + signal;
}

}  // namespace

int train(const Config& config, Output output) { return Run(config, output).go(); }

}  // namespace poise::cli
