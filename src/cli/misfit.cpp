// The floor of a budget in one sentence, and what would fit below it in another.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "poise/cli.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::cli {
namespace {

std::string described(const plan::Lever& lever) {
  return join(lever.name, " (", lever.setting, ", ",
              memory::format_bytes(lever.plan.memory.highest()), ")");
}

// "the same training would fit: a, or b"; empty where none would.
std::string fitting(const std::vector<plan::Lever>& levers, bool changes_numbers) {
  std::string text;
  for (const auto& lever : levers) {
    if (!lever.fits || lever.changes_numbers != changes_numbers) continue;
    text += join(text.empty() ? "" : ", or ", described(lever));
  }
  if (text.empty()) return text;
  return join(changes_numbers ? "another training" : "the same training", " would fit: ", text);
}

}  // namespace

std::string budget_text(std::int64_t bytes) {
  constexpr std::array kNames = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, "%.2f%s", std::ceil(100 * value) / 100, kNames[unit]);
  return text;
}

std::string what_helps(const std::vector<plan::Lever>& levers) {
  const auto same = fitting(levers, false), other = fitting(levers, true);
  if (!same.empty() || !other.empty()) {
    return join(same, same.empty() || other.empty() ? "" : "; ", other);
  }
  const auto least = std::min_element(levers.begin(), levers.end(),
                                      [](const plan::Lever& a, const plan::Lever& b) {
                                        return a.plan.memory.highest() < b.plan.memory.highest();
                                      });
  if (least == levers.end()) return "there is no lever";
  return join("no lever alone is enough; the one that needs least: ", described(*least));
}

std::string misfit(const plan::Job& job, const plan::Answer& answer) {
  return join("the least that a global batch of ", job.global_batch, " takes is ",
              memory::format_bytes(answer.floor), ", most of it ", answer.dominated_by, "; ",
              memory::format_bytes(answer.floor - answer.budget),
              " are missing: the nearest budget that works is ", budget_text(answer.floor), "; ",
              what_helps(plan::levers(job)));
}

}  // namespace poise::cli
