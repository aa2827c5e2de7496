// Cutting micro-batches, and going back to where a window began.
#include "cli/halving.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "poise/log.h"
#include "state/random.h"

namespace poise::cli {
namespace {

std::vector<data::Batch> split(const std::vector<data::Batch>& window, std::int64_t parts) {
  std::vector<data::Batch> pieces;
  for (const auto& batch : window) {
    const auto rows = batch.inputs.size(0);
    const auto size = std::max<std::int64_t>(1, (rows + parts - 1) / parts);
    for (std::int64_t first = 0; first < rows; first += size) {
      const auto count = std::min(size, rows - first);
      pieces.push_back(
          {batch.inputs.narrow(0, first, count), batch.targets.narrow(0, first, count)});
    }
  }
  return pieces;
}

std::int64_t largest(const std::vector<data::Batch>& pieces) {
  std::int64_t rows = 0;
  for (const auto& piece : pieces) rows = std::max(rows, piece.inputs.size(0));
  return rows;
}

}  // namespace

StepResult Halving::step(const std::vector<data::Batch>& window,
                         const std::function<Loss(const data::Batch&)>& loss) {
  const auto devices = state::generators_of(engine_.group().device());
  const auto random = state::random_states(engine_.group().device());
  for (;;) {
    const auto pieces = split(window, parts_);
    std::string why;
    try {
      return engine_.step(pieces, loss);
    } catch (const c10::OutOfMemoryError& error) {
      if (largest(pieces) < 2) throw;
      why = error.what_without_backtrace();
    }
    for (std::size_t i = 0; i < devices.size(); ++i) {
      state::set_random_state(devices[i], random[i].values);
    }
    parts_ *= 2;
    note_(join("  out of memory with micro-batches of ", largest(pieces),
               " samples; the window runs again in halves of them (", why, ")"));
  }
}

}  // namespace poise::cli
