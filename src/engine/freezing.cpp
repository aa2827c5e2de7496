// requires_grad of trainable parameters, window by window.
#include "engine/freezing.h"

#include <algorithm>

#include "poise/error.h"

namespace poise::engine {

Freezing::Freezing(const ParamTable& table, const std::vector<at::Tensor>& parameters)
    : table_(table),
      parameters_(parameters),
      frozen_(table.entries().size()),
      missed_(table.entries().size()) {}

void Freezing::open_window(const optim::Optimizer& optimizer) {
  for (std::size_t e = 0; e < frozen_.size(); ++e) {
    const auto& entry = table_.entries()[e];
    frozen_[e] = entry.trainable && !parameters_[e].requires_grad();
    if (!frozen_[e] || !optimizer.keeps_whole_moments()) continue;
    fail("engine", "parameter '", entry.name, "' was frozen after the engine was made, and ",
         optimizer.name(),
         " keeps moments that an update cannot leave out; set requires_grad back, or make the "
         "engine anew");
  }
}

void Freezing::check_unchanged(std::int64_t micro_batches) const {
  for (std::size_t e = 0; e < frozen_.size(); ++e) {
    const auto& entry = table_.entries()[e];
    const bool was_trained = entry.trainable && frozen_[e] == 0;
    if (parameters_[e].requires_grad() == was_trained) continue;
    fail("engine", "parameter '", entry.name, "' was ", was_trained ? "frozen" : "freed",
         " (requires_grad) within a window, which has had ", micro_batches,
         " micro-batches: its gradient would be that of a part of the window; change it between "
         "windows, after step() and before the next forward, or call discard_window() first");
  }
}

double Freezing::fingerprint() const {
  std::uint32_t number = 2166136261u;  // FNV-1a, in the bits that a double keeps
  for (const char one : frozen_) number = (number ^ static_cast<unsigned char>(one)) * 16777619u;
  return number;
}

void Freezing::mark(std::vector<OptimizerState>& states) const {
  for (auto& state : states) {
    const auto& entries = table_.flats()[static_cast<std::size_t>(state.flat)].entries;
    for (auto& segment : state.segments) {
      const auto entry = static_cast<std::size_t>(entries[static_cast<std::size_t>(segment.index)]);
      segment.frozen = frozen_[entry] != 0;
      segment.missed = missed_[entry];
    }
  }
}

void Freezing::limit_missed(std::int64_t updates) {
  for (auto& missed : missed_) missed = std::min(missed, updates);
}

void Freezing::count_update() {
  for (std::size_t e = 0; e < frozen_.size(); ++e) missed_[e] += frozen_[e];
}

}  // namespace poise::engine
