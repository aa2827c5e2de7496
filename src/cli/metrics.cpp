// Writes metrics.jsonl.
#include "cli/metrics.h"

#include <cmath>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "poise/error.h"

namespace poise::cli {

Metrics::Metrics(const std::string& folder, Output output)
    : path_((std::filesystem::path(folder) / "metrics.jsonl").string()), output_(output) {
  if (output == Output::nothing) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error) file_.open(path_, std::ios::trunc);
  if (error || !file_) {
    fail("cli", "cannot write ", path_, ": ", error ? error.message() : "not opened",
         "; choose another train.output_dir");
  }
}

void Metrics::write(const nlohmann::ordered_json& line) {
  if (output_ == Output::nothing) return;
  using Handler = nlohmann::ordered_json::error_handler_t;
  const std::string text = line.dump(-1, ' ', /*ensure_ascii=*/false, Handler::replace);
  file_ << text << '\n' << std::flush;
  if (!file_) fail("cli", "cannot write to ", path_, "; is the disk full?");
  if (output_ == Output::json) std::cout << text << '\n' << std::flush;
}

nlohmann::ordered_json plain(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

}  // namespace poise::cli
