// A trace of some updates, written by torch's profiler; chrome://tracing and Perfetto show it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace poise::cli {

class Trace {
 public:
  // `updates`: [first, last], counted from 1; empty: no trace.
  Trace(std::vector<std::int64_t> updates, std::string path);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void before(std::int64_t update);
  bool after(std::int64_t update);  // whether the trace was written now
  const std::string& path() const { return path_; }

 private:
  std::vector<std::int64_t> updates_;
  std::string path_;
  bool running_ = false;
};

}  // namespace poise::cli
