// The run itself: setting up, the loop, the end.
#include "cli/train.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <chrono>
#include <filesystem>

#include "cli/banner.h"
#include "cli/byte_gpt.h"
#include "cli/interrupt.h"
#include "cli/report.h"
#include "cli/trace.h"
#include "poise/checkpointing.h"
#include "poise/data.h"
#include "poise/engine.h"
#include "poise/error.h"
#include "poise/precision.h"

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

data::WindowLoader open_loader(const Config& config,
                               std::shared_ptr<const data::ByteCorpus> corpus) {
  data::SamplerOptions sampler;
  sampler.seed = config.engine.seed;
  sampler.order = config.data.shuffle ? data::Order::shuffled : data::Order::sequential;
  sampler.tail = data::Tail::next_epoch;  // every update has the banner's number of tokens
  data::WindowOptions window;
  window.micro_batch_size = config.batch.micro_batch_size;
  window.accumulation = config::accumulation(config.batch);
  window.prefetch = config.data.prefetch;
  return {std::move(corpus), sampler, window};
}

data::Batch on(c10::Device device, const data::Batch& batch) {
  if (device.is_cpu()) return batch;
  return {batch.inputs.to(device), batch.targets.to(device)};
}

// Everything of one run; the members are made in the order a run needs them.
class Run {
 public:
  Run(const Config& config, Output output) : config_(config), report_(config, output) {}

  int go();

 private:
  void set_up();
  void loop();
  StepResult update(std::vector<data::Batch>& window);
  void validate();
  void finish();
  std::optional<memory::Snapshot> held() const;

  const Config& config_;
  InterruptScope interrupt_;
  Report report_;
  c10::Device device_ = at::hasCUDA() && at::getNumGPUs() > 0 ? c10::kCUDA : c10::kCPU;
  Corpora corpora_;
  std::shared_ptr<ByteGpt> model_;
  std::unique_ptr<Engine> engine_;
};

void Run::set_up() {
  torch::manual_seed(config_.engine.seed);  // of dropout
  corpora_ = open_corpora(config_);
  model_ = build_model(config_, device_);
  const auto model_view = view(*model_);
  report_.banner(banner(config_, model_view, *corpora_.train,
                        checkpointing::recomputed_units(config_.checkpointing, model_->units()),
                        device_));
  engine_ = std::make_unique<Engine>(model_view, config_);
}

StepResult Run::update(std::vector<data::Batch>& window) {
  return engine_->step(window, [&](const data::Batch& batch) {
    interrupt_.check();
    return model_->loss(on(device_, batch));
  });
}

void Run::loop() {
  using Clock = std::chrono::steady_clock;
  auto loader = open_loader(config_, corpora_.train);
  Trace trace(config_.train.profile_updates,
              (std::filesystem::path(config_.train.output_dir) / "trace.json").string());
  for (std::int64_t number = 1; number <= config_.train.max_updates; ++number) {
    trace.before(number);
    const auto begin = Clock::now();
    auto window = loader.next();
    POISE_CHECK(window.has_value());  // epochs have no end here
    const auto result = update(*window);
    report_.update(result, std::chrono::duration<double>(Clock::now() - begin).count());
    if (trace.after(number)) report_.note("  trace written to " + trace.path());
    const auto every = config_.train.validate_every;
    if (every > 0 && number % every == 0 && number < config_.train.max_updates) validate();
  }
}

void Run::validate() {
  if (!corpora_.validation) return;
  const at::NoGradGuard no_grad;
  const memory::AccountScope scope(engine_->ledger(), memory::Account::activations);
  const precision::AutocastGuard autocast(device_.type(),
                                          precision::autocast_dtype(config_.precision));
  model_->eval();
  double sum = 0, samples = 0;
  const auto size = corpora_.validation->size(), micro = config_.batch.micro_batch_size;
  for (std::int64_t i = 0; i < config_.train.validation_batches && i * micro < size; ++i) {
    interrupt_.check();
    std::vector<std::int64_t> indices;
    for (auto at = i * micro; at < std::min((i + 1) * micro, size); ++at) indices.push_back(at);
    const auto loss = model_->loss(on(device_, corpora_.validation->batch(indices)));
    const auto count = static_cast<double>(indices.size());
    sum += loss.value.item<double>() * count;  // a mean over samples of one length
    samples += count;
  }
  model_->train();
  report_.validation(sum / samples);
}

void Run::finish() {
  validate();
  if (config_.train.sample_bytes > 0) {
    const auto& corpus = corpora_.validation ? *corpora_.validation : *corpora_.train;
    const auto input = corpus.sample(0).input;
    std::string prompt;
    for (std::int64_t i = 0; i < std::min(kPromptBytes, input.numel()); ++i) {
      prompt += static_cast<char>(input[i].item<std::int64_t>());
    }
    const memory::AccountScope scope(engine_->ledger(), memory::Account::activations);
    const precision::AutocastGuard autocast(device_.type(),
                                            precision::autocast_dtype(config_.precision));
    report_.sample(prompt, model_->generate(prompt, config_.train.sample_bytes, kTemperature,
                                            config_.engine.seed));
  }
}

std::optional<memory::Snapshot> Run::held() const {
  if (!engine_) return std::nullopt;
  return engine_->ledger().snapshot();
}

int Run::go() {
  try {
    set_up();
    loop();
    finish();
    report_.finish(std::nullopt, std::nullopt);
    return 0;
  } catch (const Interrupted& interrupted) {
    report_.note("ended by signal " + std::to_string(interrupted.signal));
    report_.finish("ended by signal " + std::to_string(interrupted.signal), held());
    return 128 + interrupted.signal;
  } catch (const c10::Error& error) {  // out of memory is one: the message without its backtrace
    report_.finish(error.what_without_backtrace(), held());
    throw;
  } catch (const std::exception& error) {
    report_.finish(error.what(), held());
    throw;
  }
}

}  // namespace

int train(const Config& config, Output output) { return Run(config, output).go(); }

}  // namespace poise::cli
