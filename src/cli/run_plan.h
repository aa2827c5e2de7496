// The planner and a run of the built-in model: what the file asks for, and the balance it leaves
// open.
#pragma once

#include <string>
#include <vector>

#include "poise/config.h"
#include "poise/core.h"
#include "poise/plan.h"

namespace poise::cli {

// The search for a file's model on a machine: nothing of the split is fixed, the global batch is
// the file's. Throws Error for a model that is not built in.
plan::Job job_of(const Config& config, plan::Machine machine);

// What the file itself says, before anything is searched.
plan::Plan as_written(const Config& config, const plan::Job& job);

struct Balance {
  Config config;                   // with what was open filled in
  plan::Plan plan;                 // what they will take
  std::vector<std::string> lines;  // for people
};

// Fills what config.balance_is_open() leaves open: micro-batch, recomputation, chunks of the loss,
// the stage, and where nothing fits otherwise the place of the optimizer's states. What the file
// sets stays: a checkpointing policy other than none, model.loss_chunk_tokens, zero.stage above 0,
// offload.optimizer. Throws Error where nothing fits the
// budget, with the smallest that would do (memory.on_misfit warn: takes the smallest plan instead).
Balance find_balance(const Config& config, int ranks, c10::Device device);

// "plan  peak 20.1 MiB predicted, 20.1 MiB measured (+0.0%)", the accounts, and the seconds.
std::vector<std::string> compare(const plan::Plan& predicted, const StepResult& measured);

}  // namespace poise::cli
