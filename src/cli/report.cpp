// The report of a run.
#include "cli/report.h"

#include "cli/run_plan.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

namespace poise::cli {
namespace {

using Json = nlohmann::ordered_json;

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

Json accounts_json(const std::array<std::int64_t, memory::kAccounts>& accounts) {
  Json out = Json::object();
  for (int i = 0; i < memory::kAccounts; ++i) {
    out[memory::name_of(static_cast<memory::Account>(i))] = accounts[static_cast<std::size_t>(i)];
  }
  return out;
}

const char* name(config::DType dtype) {
  return dtype == config::DType::fp32 ? "fp32" : dtype == config::DType::bf16 ? "bf16" : "fp16";
}

}  // namespace

Report::Report(const Config& config, Output output, int ranks)
    : config_(config),
      output_(output),
      ranks_(ranks),
      metrics_(config.train.output_dir, output,
               config.state.resume == "none" ? Metrics::Old::replaced : Metrics::Old::kept),
      terminal_(output == Output::text && isatty(STDOUT_FILENO) != 0) {
  // Lines of the log would be written into the live line.
  old_sink_ = log::set_sink([this](log::Level level, const std::string& text) {
    if (output_ != Output::text) {
      std::cerr << text << '\n';
    } else {
      line(text);
    }
  });
}

Report::~Report() {
  if (live_) std::cout << std::endl;
  log::set_sink(std::move(old_sink_));
}

void Report::line(const std::string& text) {
  if (output_ != Output::text) return;
  if (live_) std::cout << '\n';
  live_ = false;
  std::cout << text << std::endl;
}

void Report::live(const std::string& text) {
  std::cout << '\r' << text << "\x1b[K"
            << std::flush;  // to the end of the line: what was there before
  live_ = true;
}

void Report::banner(const std::vector<std::string>& lines) {
  for (const auto& text : lines) line(text);
}

void Report::note(const std::string& text) { line(text); }

void Report::update(const StepResult& result, double seconds) {
  ++updates_;
  losses_.push_back(result.loss);
  tokens_ += result.tokens;
  if (updates_ > 1) {
    steady_tokens_ += result.tokens;
    steady_seconds_ += seconds;
  }
  ++logged_updates_;
  logged_loss_ += result.loss;
  logged_tokens_ += result.tokens;
  logged_seconds_ += seconds;
  skipped_ = result.skipped;
  host_bytes_ = result.host_bytes;
  file_bytes_ = result.file_bytes;
  if (result.peak_bytes > peak_bytes_) {
    peak_bytes_ = result.peak_bytes;
    accounts_ = result.accounts;
  }

  const bool due = updates_ % config_.train.log_every == 0 ||
                   updates_ == config_.train.max_updates || updates_ == 1 ||
                   result.status != Status::applied;
  if (due || terminal_) {
    const auto text =
        format("update %lld/%lld  loss %.4f  lr %.3g  norm %.3f  %.0f tokens/s  %s",
               static_cast<long long>(updates_), static_cast<long long>(config_.train.max_updates),
               result.loss, result.lr, result.grad_norm, result.tokens / std::max(seconds, 1e-9),
               memory::format_bytes(result.peak_bytes).c_str());
    const bool applied = result.status == Status::applied;
    if (terminal_ && applied) {
      live(text);
    } else {
      const auto& bad = result.first_bad_parameter;
      line(applied ? text
                   : text + "  " + name_of(result.status) + (bad.empty() ? "" : " in " + bad));
    }
  }
  if (due) write_update(result);
}

void Report::write_update(const StepResult& result) {
  Json out;
  out["step"] = updates_;
  out["loss"] = plain(logged_loss_ / static_cast<double>(logged_updates_));
  out["grad_norm"] = plain(result.grad_norm);
  out["learning_rate"] = result.lr;
  if (config_.engine.noise_scale) out["noise_scale"] = plain(result.noise_scale);
  out["tokens_per_second"] = logged_tokens_ / std::max(logged_seconds_, 1e-9);
  out["tokens"] = tokens_;
  out["peak_bytes"] = peak_bytes_;
  out["accounts"] = accounts_json(result.accounts);
  out["host_bytes"] = host_bytes_;
  out["file_bytes"] = file_bytes_;
  out["status"] = name_of(result.status);
  out["skipped"] = result.skipped;
  if (config_.precision.dtype == config::DType::fp16) out["loss_scale"] = result.loss_scale;
  if (!result.first_bad_parameter.empty()) out["first_bad_parameter"] = result.first_bad_parameter;
  metrics_.write(out);
  logged_loss_ = logged_tokens_ = logged_seconds_ = 0;
  logged_updates_ = 0;
}

void Report::compared(const plan::Plan& predicted, const StepResult& measured) {
  for (const auto& text : compare(predicted, measured)) line(text);
  metrics_.write({{"step", updates_},
                  {"plan",
                   {{"predicted", accounts_json(predicted.memory.at_peak)},
                    {"measured", accounts_json(measured.accounts)},
                    {"predicted_seconds", predicted.time.total},
                    {"measured_seconds", measured.total_seconds}}}});
}

void Report::validation(double loss) {
  validation_loss_ = loss;
  line(format("  validation after update %lld: loss %.4f", static_cast<long long>(updates_), loss));
  metrics_.write({{"step", updates_}, {"eval_loss", plain(loss)}});
}

namespace {

// Bytes that a model writes must not steer the terminal: all but printable ASCII, tabs and line
// ends become dots.
std::string printable(std::string text) {
  for (char& c : text) {
    const bool plain_character = (c >= ' ' && c <= '~') || c == '\n' || c == '\t';
    if (!plain_character) c = '.';
  }
  return text;
}

}  // namespace

void Report::sample(const std::string& prompt, const std::string& text) {
  sample_ = text;
  line(join("  after the text\n", printable(prompt), "\n  it goes on\n", printable(text)));
  metrics_.write({{"step", updates_}, {"prompt", prompt}, {"sample", text}});
}

double Report::tokens_per_second() const {
  return steady_seconds_ > 0 ? steady_tokens_ / steady_seconds_ : 0;
}

void Report::finish(const std::optional<std::string>& error,
                    const std::optional<memory::Snapshot>& held) {
  if (held && held->peak_bytes > peak_bytes_) {
    peak_bytes_ = held->peak_bytes;
    accounts_ = held->at_peak;
  }
  const auto accumulation = config::accumulation(config_.batch, ranks_);
  Json losses = Json::array();
  for (const double loss : losses_) losses.push_back(plain(loss));
  Json out = {
      {"summary", true},
      {"language", "cpp"},
      {"ranks", ranks_},
      {"stage", config_.zero.stage},
      {"precision", name(config_.precision.dtype)},
      {"micro_batch", config::micro_batch_size(config_.batch)},
      {"accumulation", accumulation},
      {"checkpointing", config_.checkpointing.policy},
      {"budget_bytes", config_.memory.budget_bytes},
      {"updates", updates_},
      {"skipped", skipped_},
      {"tokens", tokens_},
      {"tokens_per_s", tokens_per_second()},
      {"peak_bytes", peak_bytes_},
      {"accounts", accounts_json(accounts_)},
      {"host_bytes", host_bytes_},
      {"file_bytes", file_bytes_},
      {"losses", losses},
      {"val_loss", validation_loss_ ? plain(*validation_loss_) : Json(nullptr)},
      {"error", error ? Json(*error) : Json(nullptr)},
  };
  metrics_.write(out);
  if (error) return;
  line(format("done: %lld updates, %.0f tokens/s, peak %s", static_cast<long long>(updates_),
              tokens_per_second(), memory::format_bytes(peak_bytes_).c_str()));
}

}  // namespace poise::cli
