// The metrics of a run as JSON lines: one object a line, written at once, so that a run that ends
// badly leaves everything up to its end. Same keys as the Python trainer's.
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/train.h"

namespace poise::cli {

class Metrics {
 public:
  enum class Old { replaced, kept };
  // Makes the folder and an empty metrics.jsonl in it; Output::json also prints every line,
  // Output::nothing writes none.
  Metrics(const std::string& folder, Output output, Old old = Old::replaced);

  std::int64_t lines() const { return lines_; }  // of the file
  // Of a file that was kept: what follows its first `lines` is dropped.
  void go_on_after(std::int64_t lines);

  void write(const nlohmann::ordered_json& line);  // throws Error where the disk does not take it

 private:
  std::string path_;
  std::ofstream file_;
  Output output_;
  std::int64_t lines_ = 0;
};

// Infinity and NaN as text: JSON has no word for them.
nlohmann::ordered_json plain(double value);

}  // namespace poise::cli
