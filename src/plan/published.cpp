// Tables of runs to their predictions.
#include "plan/published.h"

namespace poise::plan {

std::vector<RunPrediction> predict_runs(const std::string& table) {
  constexpr double kGib = 1024.0 * 1024 * 1024;
  std::vector<RunPrediction> predictions;
  for (const auto& row : published::read_table(table)) {
    RunPrediction p;
    p.id = row.id;
    p.predicted = row.predictable;
    if (row.predictable) {
      p.peak_gib = published::peak_bytes(row.run) / kGib;
      p.tokens_per_second = published::tokens_per_second(row.run);
      p.meter_offset_gib = published::meter_offset(row.run) / kGib;
      p.device_constant = published::device_constant(row.run.device);
    }
    predictions.push_back(std::move(p));
  }
  return predictions;
}

}  // namespace poise::plan
