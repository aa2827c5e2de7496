// Tables and sentences; the same figures as JSON.
#include "cli/plan_page.h"

#include <algorithm>
#include <cstdio>
#include <ostream>

#include "cli/plan_machine.h"
#include "poise/cli.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::cli {
namespace {

using plan::Plan;

template <class... Values>
std::string text(const char* format, Values... values) {
  char buffer[256];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

std::string duration(double seconds) {
  return seconds >= 1 ? text("%.2f s", seconds) : text("%.2f ms", 1e3 * seconds);
}

std::string counted(double parameters) {
  return parameters >= 1e9 ? text("%.3g billion", parameters / 1e9)
                           : text("%.3g million", parameters / 1e6);
}

std::string recomputed(const plan::Choice& choice) {
  const auto count = std::count(choice.recomputed.begin(), choice.recomputed.end(), true);
  if (count == 0) return "none";
  return join(count, " of ", choice.recomputed.size(),
              choice.recompute == plan::Recompute::selective ? " selectively" : "");
}

std::string offloaded(const config::OffloadPolicy& offload) {
  std::string names;
  const std::pair<const char*, config::Offload> kinds[] = {{"optimizer", offload.optimizer},
                                                           {"gradients", offload.gradients},
                                                           {"parameters", offload.parameters},
                                                           {"activations", offload.activations}};
  for (const auto& [kind, place] : kinds) {
    if (place == config::Offload::none) continue;
    names += join(names.empty() ? "" : ", ", kind,
                  place == config::Offload::host ? " on the host" : " in a file");
  }
  return names;
}

void print_plan(std::ostream& out, const plan::Job& job, const Plan& plan) {
  const auto& c = plan.choice;
  const auto& m = plan.memory;
  const auto& t = plan.time;
  out << "  micro-batch " << c.micro_batch << " x accumulation " << c.accumulation << " x ranks "
      << c.ranks << '\n';
  out << "  recomputed blocks: " << recomputed(c) << "; logits: "
      << (c.loss_chunk_tokens > 0 ? join("of ", c.loss_chunk_tokens, " tokens at a time")
                                  : std::string("of a whole micro-batch"));
  if (c.ranks > 1) {
    out << "; ZeRO stage " << c.stage
        << (c.keep_gathered ? ", parameters whole for a window (zero.keep_gathered)" : "");
    if (c.shard_ranks > 0) {
      out << ", sharded inside groups of " << c.shard_ranks
          << " ranks and replicated across them (poise.comm.hybrid(" << c.shard_ranks << "))";
    }
  }
  const auto away = offloaded(c.offload);
  if (!away.empty()) out << "; offloaded: " << away;
  out << "\n\n" << text("  %-14s %14s %14s\n", "memory for", "all the time", "at the peak");
  for (std::size_t i = 0; i < m.at_peak.size(); ++i) {
    if (m.at_peak[i] == 0 && m.held[i] == 0) continue;
    out << text("  %-14s %14s %14s\n", memory::name_of(static_cast<memory::Account>(i)),
                memory::format_bytes(m.held[i]).c_str(),
                memory::format_bytes(m.at_peak[i]).c_str());
  }
  out << text("  %-14s %14s %14s   in the %s\n", "all",
              memory::format_bytes(plan::total(m.held)).c_str(),
              memory::format_bytes(m.peak).c_str(), m.moment.c_str());
  if (m.build > m.peak) {
    out << "  while the engine is built, the user's model beside it: "
        << memory::format_bytes(m.build) << '\n';
  }
  out << "\n  " << duration(t.total) << " an update (" << text("%.0f", tokens_per_second(job, plan))
      << " tokens/s on each device): forward " << duration(t.forward) << ", backward "
      << duration(t.backward);
  if (t.recompute > 0) out << ", recomputation " << duration(t.recompute);
  if (t.exposed > 0) out << ", communication that is not overlapped " << duration(t.exposed);
  if (t.transfers > 0) out << ", offload that is not overlapped " << duration(t.transfers);
  out << ", optimizer " << duration(t.update) << '\n';
}

// A row of the front, or its head.
std::string row_text(const std::string& time, const std::string& peak, const std::string& batch,
                     const std::string& stage, const std::string& blocks, const std::string& logits,
                     const std::string& mark) {
  auto row = text("  %11s %12s %12s %7s %22s %7s  %s", time.c_str(), peak.c_str(), batch.c_str(),
                  stage.c_str(), blocks.c_str(), logits.c_str(), mark.c_str());
  row.erase(row.find_last_not_of(' ') + 1);
  return row + '\n';
}

void print_row(std::ostream& out, const Plan& plan, const char* mark) {
  const auto& c = plan.choice;
  out << row_text(duration(plan.time.total), memory::format_bytes(plan.memory.highest()),
                  std::to_string(c.micro_batch), join(c.stage, c.keep_gathered ? "k" : " "),
                  recomputed(c),
                  c.loss_chunk_tokens > 0 ? std::to_string(c.loss_chunk_tokens) : "whole", mark);
}

// At most `count` of the front: its ends, the best plan and its neighbours, evenly between.
std::vector<std::size_t> chosen_rows(const std::vector<Plan>& front, std::int64_t budget) {
  constexpr std::size_t kRows = 10;
  std::vector<std::size_t> rows;
  const auto best = static_cast<std::size_t>(
      std::find_if(front.begin(), front.end(),
                   [&](const Plan& plan) { return plan.memory.highest() <= budget; }) -
      front.begin());
  for (std::size_t i = 0; i < front.size(); ++i) {
    const bool near = i + 1 >= best && i <= best + 1;
    const bool even = i == 0 || i + 1 == front.size() ||
                      i * kRows / front.size() != (i - 1) * kRows / front.size();
    if (near || even) rows.push_back(i);
  }
  return rows;
}

void print_front(std::ostream& out, const plan::Answer& answer) {
  out << "\nTime against memory (every other plan is slower or bigger than one of these):\n"
      << row_text("an update", "peak", "micro-batch", "stage ", "recomputed blocks", "logits", "");
  bool marked = false, kept = false, chunked = false;
  for (const auto i : chosen_rows(answer.front, answer.budget)) {
    const auto& plan = answer.front[i];
    const bool fits = plan.memory.highest() <= answer.budget;
    print_row(out, plan, fits && !marked ? "<- chosen" : fits ? "" : "does not fit");
    marked = marked || fits;
    kept = kept || plan.choice.keep_gathered;
    chunked = chunked || plan.choice.loss_chunk_tokens > 0;
  }
  if (kept)
    out << "  stage 3k: parameters stay whole through a window (zero.keep_gathered: window)\n";
  if (chunked) out << "  logits: tokens whose logits are there at a time (loss_chunk_tokens)\n";
}

void print_levers(std::ostream& out, const std::vector<plan::Lever>& levers) {
  if (levers.empty()) return;
  out << "\nWhat else would lower it, each alone (never done unasked):\n"
      << text("  %11s %12s  %-12s  %-11s  %s\n", "an update", "peak", "", "training", "by");
  for (const auto& lever : levers) {
    out << text("  %11s %12s  %-12s  %-11s  %s (%s)\n", duration(lever.plan.time.total).c_str(),
                memory::format_bytes(lever.plan.memory.highest()).c_str(),
                lever.fits ? "fits" : "does not fit",
                lever.changes_numbers ? "another" : "the same", lever.name.c_str(),
                lever.setting.c_str());
  }
}

void print_cost(std::ostream& out, const Page& page, const Plan& plan) {
  if (page.price.gpu_hour <= 0) return;
  const auto& job = page.job;
  const auto cost =
      plan::cost(plan, static_cast<double>(job.global_batch * job.sequence), page.price);
  out << text("\nAt %g an hour for each device: %.0f a month of 730 hours, %.2f per billion tokens",
              page.price.gpu_hour, cost.month, cost.billion_tokens);
  out << text(" (%.0f%% of the paid hours train)\n", 100 * page.price.utilisation);
}

void print_answer(std::ostream& out, const plan::Job& job, const plan::Answer& answer) {
  if (!answer.fits) {
    const auto floor = answer.floor;
    out << "\nNo plan fits into " << memory::format_bytes(answer.budget) << ". The smallest needs "
        << memory::format_bytes(floor) << ", "
        << memory::format_bytes(std::max<std::int64_t>(0, floor - answer.budget))
        << " more (the largest part: " << answer.dominated_by << "); with --memory "
        << budget_text(floor) << " or more ranks it would be this one:\n";
  } else {
    out << "\nThe fastest plan that fits:\n";
  }
  print_plan(out, job, answer.best);
  print_front(out, answer);
  if (answer.has_runner_up) {
    const auto& other = answer.runner_up;
    out << "\nNext best: micro-batch " << other.choice.micro_batch << ", stage "
        << other.choice.stage << (other.choice.keep_gathered ? " (parameters kept)" : "")
        << (other.choice.shard_ranks > 0 ? join(" in groups of ", other.choice.shard_ranks) : "")
        << ", recomputed " << recomputed(other.choice) << ": " << duration(other.time.total)
        << ", slower by " << answer.why << ".\n";
  }
  out << "\nIn a run.json: " << plan::settings(answer.best.choice) << '\n';
}

}  // namespace

double tokens_per_second(const plan::Job& job, const Plan& plan) {
  return static_cast<double>(job.global_batch * job.sequence) / plan.time.total / plan.choice.ranks;
}

void print_page(std::ostream& out, const Page& page) {
  const auto& job = page.job;
  const auto* answer = page.answer;
  const auto* written = page.written;
  const auto& device = job.machine.device;
  out << job.model.name << ", " << counted(static_cast<double>(parameters(job.model)))
      << " parameters, on " << job.machine.ranks << " x " << device.name << "; " << job.global_batch
      << " sequences of " << job.sequence << " tokens an update\n";
  if (answer != nullptr) {
    out << "memory budget of each device: " << memory::format_bytes(answer->budget);
    if (job.budget == 0) {
      out << " (" << memory::format_bytes(device.memory) << " less "
          << memory::format_bytes(plan::reserve(device))
          << " for the GPU's own use and fragmentation)";
    }
    out << '\n';
  }
  if (written != nullptr) {
    const bool fits = answer == nullptr || written->memory.highest() <= answer->budget;
    out << "\nAs the file says" << (fits ? "" : " (does not fit)") << ":\n";
    print_plan(out, job, *written);
  }
  if (answer != nullptr) {
    print_answer(out, job, *answer);
    print_levers(out, page.levers);
    print_cost(out, page, answer->best);
  } else if (written != nullptr) {
    print_cost(out, page, *written);
  }
  out << "\nMemory is counted from the model's operations; times are estimates from "
      << (is_measured(device) ? "rates that were measured here"
          : device.place == plan::Place::cpu
              ? "a guess at this CPU (poise plan --calibrate measures it)"
              : "data sheets and the share of them that is usually reached")
      << " (docs/planner.md).\n";
}

}  // namespace poise::cli
