// Writes metrics.jsonl.
#include "cli/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "poise/error.h"

namespace poise::cli {

Metrics::Metrics(const std::string& folder, Output output, Old old)
    : path_((std::filesystem::path(folder) / "metrics.jsonl").string()), output_(output) {
  if (output == Output::nothing) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error) file_.open(path_, old == Old::kept ? std::ios::app : std::ios::trunc);
  if (error || !file_) {
    fail("cli", "cannot write ", path_, ": ", error ? error.message() : "not opened",
         "; choose another train.output_dir");
  }
}

// Through a new file that takes the old one's place, so that none of it is lost on the way.
void Metrics::go_on_after(std::int64_t lines) {
  if (output_ == Output::nothing) return;
  const auto next = path_ + ".new";
  {
    std::ifstream old(path_);
    std::ofstream kept(next, std::ios::trunc);
    std::string line;
    for (lines_ = 0; lines_ < lines && std::getline(old, line); ++lines_) kept << line << '\n';
    kept.flush();
    if (!kept) fail("cli", "cannot write ", next, "; is the disk full?");
  }
  file_.close();
  if (std::rename(next.c_str(), path_.c_str()) != 0) {
    fail("cli", "cannot replace ", path_, ": ", std::strerror(errno));
  }
  file_.open(path_, std::ios::app);
}

void Metrics::write(const nlohmann::ordered_json& line) {
  if (output_ == Output::nothing) return;
  using Handler = nlohmann::ordered_json::error_handler_t;
  const std::string text = line.dump(-1, ' ', /*ensure_ascii=*/false, Handler::replace);
  file_ << text << '\n' << std::flush;
  ++lines_;
  if (!file_) fail("cli", "cannot write to ", path_, "; is the disk full?");
  if (output_ == Output::json) std::cout << text << '\n' << std::flush;
}

nlohmann::ordered_json plain(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

}  // namespace poise::cli
