// The metrics of a run as JSON lines: one object a line, written at once, so that a run that ends
// badly leaves everything up to its end. Same keys as the Python trainer's.
#pragma once

#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/train.h"

namespace poise::cli {

class Metrics {
 public:
  // Makes the folder and an empty metrics.jsonl in it; Output::json also prints every line,
  // Output::nothing writes none.
  Metrics(const std::string& folder, Output output);

  void write(const nlohmann::ordered_json& line);  // throws Error where the disk does not take it

 private:
  std::string path_;
  std::ofstream file_;
  Output output_;
};

// Infinity and NaN as text: JSON has no word for them.
nlohmann::ordered_json plain(double value);

}  // namespace poise::cli
