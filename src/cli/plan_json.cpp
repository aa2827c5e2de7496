// The planner's answer for programs, and for the page with plots (python/poise/plan_page.py).
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/plan_page.h"
#include "poise/cli.h"
#include "poise/memory.h"

namespace poise::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::Plan;

Json accounts(const plan::Accounts& bytes) {
  Json out = Json::object();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    out[memory::name_of(static_cast<memory::Account>(i))] = bytes[i];
  }
  return out;
}

const char* place_name(config::Offload place) {
  return place == config::Offload::host ? "host" : place == config::Offload::file ? "file" : "none";
}

Json plan_json(const plan::Job& job, const Plan& plan) {
  const auto& c = plan.choice;
  const auto& t = plan.time;
  return {{"micro_batch_size", c.micro_batch},
          {"accumulation", c.accumulation},
          {"ranks", c.ranks},
          {"stage", c.stage},
          {"keep_gathered", c.keep_gathered},
          {"shard_ranks", plan::shard_ranks(c)},
          {"recomputed_blocks", std::count(c.recomputed.begin(), c.recomputed.end(), true)},
          {"selective", c.recompute == plan::Recompute::selective},
          {"activations", place_name(c.offload.activations)},
          {"loss_chunk_tokens", c.loss_chunk_tokens},
          {"peak_bytes", plan.memory.peak},
          {"peak_moment", plan.memory.moment},
          {"build_bytes", plan.memory.build},
          {"held", accounts(plan.memory.held)},
          {"at_peak", accounts(plan.memory.at_peak)},
          {"seconds",
           {{"update", t.total},
            {"forward", t.forward},
            {"backward", t.backward},
            {"recompute", t.recompute},
            {"exposed_collectives", t.exposed},
            {"exposed_transfers", t.transfers},
            {"optimizer", t.update}}},
          {"tokens_per_second_per_rank", tokens_per_second(job, plan)}};
}

// Every moment of an update, forward then backward.
Json moments_json(const plan::Job& job, const Plan& plan) {
  Json out = Json::array();
  const auto made = plan::chain(job, plan.choice);
  for (const auto& moment : plan::moments(made, plan.choice, plan::widths(job))) {
    out.push_back({{"moment", moment.name}, {"accounts", accounts(moment.accounts)}});
  }
  return out;
}

Json levers_json(const plan::Job& job, const std::vector<plan::Lever>& levers) {
  Json out = Json::array();
  for (const auto& lever : levers) {
    out.push_back({{"name", lever.name},
                   {"setting", lever.setting},
                   {"changes_numbers", lever.changes_numbers},
                   {"fits", lever.fits},
                   {"plan", plan_json(job, lever.plan)}});
  }
  return out;
}

Json cost_json(const Page& page, const Plan& plan) {
  const auto tokens = static_cast<double>(page.job.global_batch * page.job.sequence);
  const auto cost = plan::cost(plan, tokens, page.price);
  return {{"gpu_hour", page.price.gpu_hour},
          {"utilisation", page.price.utilisation},
          {"month", cost.month},
          {"billion_tokens", cost.billion_tokens}};
}

}  // namespace

std::string page_json(const Page& page) {
  const auto& job = page.job;
  Json out{{"model", job.model.name},
           {"parameters", parameters(job.model)},
           {"device", job.machine.device.name},
           {"ranks", job.machine.ranks},
           {"ranks_per_node", job.machine.ranks_per_node},
           {"sequence", job.sequence},
           {"global_batch", job.global_batch}};
  const Plan* shown = page.answer != nullptr ? &page.answer->best : page.written;
  if (page.written != nullptr) out["as_written"] = plan_json(job, *page.written);
  if (shown != nullptr) {
    out["moments"] = moments_json(job, *shown);
    if (page.price.gpu_hour > 0) out["cost"] = cost_json(page, *shown);
  }
  if (page.answer == nullptr) return out.dump(2);
  const auto& answer = *page.answer;
  out["budget_bytes"] = answer.budget;
  out["fits"] = answer.fits;
  out[answer.fits ? "best" : "smallest"] = plan_json(job, answer.best);
  if (!answer.fits) {
    out["dominated_by"] = answer.dominated_by;
    out["missing_bytes"] = answer.floor - answer.budget;
    out["nearest_budget"] = budget_text(answer.floor);
  }
  if (answer.has_runner_up) {
    out["runner_up"] = plan_json(job, answer.runner_up);
    out["runner_up"]["slower_by"] = answer.why;
  }
  for (const auto& plan : answer.front) out["front"].push_back(plan_json(job, plan));
  if (!page.levers.empty()) out["levers"] = levers_json(job, page.levers);
  out["settings"] = Json::parse(plan::settings(answer.best.choice));
  return out.dump(2);
}

}  // namespace poise::cli
