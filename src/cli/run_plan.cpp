// What a file asks of the planner, and what the planner gives back to the run.
#include "cli/run_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cli/plan_machine.h"
#include "poise/checkpointing.h"
#include "poise/cli.h"
#include "poise/error.h"
#include "poise/memory.h"
#include "poise/module_plan.h"

namespace poise::cli {
namespace {

using memory::format_bytes;

std::vector<std::string> block_names(std::int64_t layers) {
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < layers; ++i) names.push_back(join("blocks.", i));
  return names;
}

std::vector<bool> recomputed(const Config& config, std::int64_t layers) {
  return checkpointing::recomputed_units(config.checkpointing, block_names(layers));
}

// Blocks whose activations are offloaded; empty: all that forward saves.
std::vector<bool> activations_of(const Config& config, std::int64_t layers) {
  const auto& chosen = config.offload.activation_units;
  if (chosen.empty()) return {};
  return checkpointing::matching_units(chosen, block_names(layers));
}

plan::Recompute recompute(const Config& config) {
  return config.checkpointing.policy == "selective" ? plan::Recompute::selective
                                                    : plan::Recompute::whole;
}

void apply(const plan::Choice& choice, Config& config) {
  config.batch.micro_batch_size = choice.micro_batch;
  config.batch.accumulation = choice.accumulation;
  const auto blocks = std::count(choice.recomputed.begin(), choice.recomputed.end(), true);
  if (config.checkpointing.policy == "none" && blocks > 0) {
    const bool selective = choice.recompute == plan::Recompute::selective;
    config.checkpointing.policy = selective ? "selective" : "first_m";
    config.checkpointing.n = selective ? 1 : blocks;
  }
  config.model.loss_chunk_tokens = choice.loss_chunk_tokens;
  if (choice.ranks > 1) {
    config.zero.stage = choice.stage;
    if (choice.keep_gathered) config.zero.keep_gathered = config::KeepGathered::window;
  }
  config.offload.optimizer = choice.offload.optimizer;
}

[[noreturn]] void refuse(const plan::Job& job, const plan::Answer& answer) {
  fail("plan", "no balance fits memory.budget_bytes ", format_bytes(answer.budget), ": ",
       misfit(job, answer), "; or set memory.on_misfit to warn");
}

std::string percent(std::int64_t predicted, std::int64_t measured) {
  char text[32];
  std::snprintf(text, sizeof text, "%+.1f%%",
                100.0 * static_cast<double>(measured - predicted) /
                    static_cast<double>(std::max<std::int64_t>(predicted, 1)));
  return text;
}

}  // namespace

plan::Job job_of(const Config& config, plan::Machine machine) {
  if (config.model.builtin != "byte_gpt") {
    fail("plan", "model.builtin is \"", config.model.builtin, "\"; known: byte_gpt");
  }
  plan::Job job;
  job.machine = std::move(machine);
  job.model = plan::byte_gpt(config.model);
  job.sequence = config.model.sequence_length;
  job.precision = config.precision;
  job.optimizer = config.optimizer;
  job.budget = config.memory.budget_bytes;
  const auto group = static_cast<int>(config.zero.shard_group_size);
  if (group > 0 && job.machine.ranks > 1) job.shard_ranks = {group};
  job.offloads = {config.offload};
  job.activations_of = activations_of(config, config.model.layers);
  job.cpu = cpu_operators();
  const auto ranks = job.machine.ranks;
  job.global_batch = config.batch.global_batch_size;
  if (job.global_batch == 0) {
    job.global_batch =
        config::micro_batch_size(config.batch) * config::accumulation(config.batch, ranks) * ranks;
  }
  return job;
}

plan::Plan as_written(const Config& config, const plan::Job& job) {
  plan::Plan written;
  auto& choice = written.choice;
  choice.ranks = job.machine.ranks;
  choice.shard_ranks = job.shard_ranks.empty() ? 0 : job.shard_ranks.front();
  choice.micro_batch = config::micro_batch_size(config.batch);
  choice.accumulation = config::accumulation(config.batch, choice.ranks);
  choice.stage = static_cast<int>(config.zero.stage);
  choice.reduces_every = config::reduces_every_micro_batch(config.zero);
  choice.keep_gathered = config.zero.keep_gathered == config::KeepGathered::window;
  choice.overlap = config.zero.overlap;
  choice.gradient_dtype = config.zero.gradient_dtype;
  choice.loss_chunk_tokens = config.model.loss_chunk_tokens;
  choice.recomputed = recomputed(config, job.model.layers);
  choice.recompute = recompute(config);
  choice.offload = config.offload;
  choice.activations_of = job.activations_of;
  const auto widths = plan::widths(config.precision, config.optimizer, choice.gradient_dtype);
  const auto chain =
      plan::chain(job.model, {choice.micro_batch, job.sequence, choice.loss_chunk_tokens},
                  config.precision, job.machine.device.place, job.cpu);
  written.memory = plan::memory(chain, choice, widths);
  written.time = plan::time(chain, choice, widths, config.precision, job.machine,
                            choice.micro_batch * job.sequence);
  return written;
}

namespace {

// What lies on the host is outside the budget and slower to update: only where nothing fits
// without.
plan::Answer search_balance(plan::Job& job) {
  auto answer = plan::search(job);
  auto& offload = job.offloads.front();
  const bool open = offload.optimizer == config::Offload::none;
  if (answer.fits || !open || !plan::may_offload(job.optimizer)) return answer;
  offload.optimizer = config::Offload::host;
  return plan::search(job);
}

// "stage 2, parameters kept for the window; optimizer states on the host"; empty: nothing of it.
std::string places(const plan::Choice& choice) {
  std::string text;
  if (choice.ranks > 1) text = join(", stage ", choice.stage);
  if (choice.keep_gathered) text += ", parameters kept for the window";
  if (choice.offload.optimizer == config::Offload::host) text += ", optimizer states on the host";
  return text;
}

}  // namespace

Balance find_balance(const Config& config, int ranks, c10::Device device) {
  auto machine = plan::read_machine(join(ranks, "xCPU"));
  machine.device = device.is_cpu() ? this_cpu() : this_gpu();
  auto job = job_of(config, std::move(machine));
  if (job.shard_ranks.empty()) job.shard_ranks = {ranks};
  if (config.zero.stage > 0) job.stages = {static_cast<int>(config.zero.stage)};
  if (config.checkpointing.policy != "none") {
    job.searches_recompute = false;
    job.recompute = recompute(config);
    job.recomputed = recomputed(config, job.model.layers);
  }
  if (config.model.loss_chunk_tokens > 0) {
    job.searches_chunk = false;
    job.loss_chunk_tokens = config.model.loss_chunk_tokens;
  }
  const auto answer = search_balance(job);
  if (!answer.fits && config.memory.on_misfit == config::OnMisfit::refuse) refuse(job, answer);
  Balance found{config, answer.best, {}};
  apply(answer.best.choice, found.config);
  const auto& best = answer.best;
  const auto blocks =
      std::count(best.choice.recomputed.begin(), best.choice.recomputed.end(), true);
  found.lines.push_back(
      join("  plan: ", answer.candidates, " candidates; the fastest that fits ",
           format_bytes(answer.budget), " holds ", format_bytes(best.memory.highest()), " (",
           best.memory.moment, "), recomputes ", blocks, " of ", job.model.layers, " blocks",
           best.choice.loss_chunk_tokens > 0
               ? join(", logits of ", best.choice.loss_chunk_tokens, " tokens at once")
               : std::string(),
           places(best.choice)));
  if (answer.has_runner_up) {
    const auto& other = answer.runner_up.choice;
    found.lines.push_back(join("  runner-up: micro-batch ", other.micro_batch,
                               ranks > 1 ? join(" at stage ", other.stage) : std::string(),
                               ", behind by ", answer.why));
  }
  if (!answer.fits) {
    found.lines.push_back(join("  nothing fits the budget of ", format_bytes(answer.budget),
                               "; this is the plan of least memory: ", misfit(job, answer)));
  }
  return found;
}

std::vector<std::string> compare(const plan::Plan& predicted, const StepResult& measured) {
  const auto& bytes = predicted.memory;
  std::vector<std::string> lines{join("  plan: peak ", format_bytes(bytes.peak), " predicted, ",
                                      format_bytes(measured.peak_bytes), " measured (",
                                      percent(bytes.peak, measured.peak_bytes), ")")};
  std::string accounts;
  for (std::size_t i = 0; i < bytes.at_peak.size(); ++i) {
    if (bytes.at_peak[i] == 0 && measured.accounts[i] == 0) continue;
    accounts +=
        join(accounts.empty() ? "        " : ", ", memory::name_of(static_cast<memory::Account>(i)),
             " ", format_bytes(bytes.at_peak[i]), " / ", format_bytes(measured.accounts[i]));
  }
  lines.push_back(accounts);
  char seconds[128];
  std::snprintf(seconds, sizeof seconds, "        an update %.3g s predicted, %.3g s measured",
                predicted.time.total, measured.total_seconds);
  lines.push_back(seconds);
  return lines;
}

}  // namespace poise::cli
