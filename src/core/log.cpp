// The sink behind poise/log.h: one mutex, one function.
#include "poise/log.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

namespace poise::log {
namespace {

struct State {
  std::mutex mutex;
  Sink sink;
  Level level = Level::info;

  State() {
    const char* wanted = std::getenv("POISE_LOG");
    const std::string_view name = wanted ? wanted : "";
    if (name == "debug") level = Level::debug;
    if (name == "warning") level = Level::warning;
    if (name == "error") level = Level::error;
  }
};

// Never destroyed: worker threads may still log while statics go down.
State& state() {
  static State* one = new State;
  return *one;
}

constexpr const char* kNames[] = {"debug", "info", "warning", "error"};

}  // namespace

Sink set_sink(Sink sink) {
  std::lock_guard lock(state().mutex);
  std::swap(state().sink, sink);
  return sink;
}

void set_level(Level level) {
  std::lock_guard lock(state().mutex);
  state().level = level;
}

void write(Level level, const std::string& line) {
  Sink sink;
  {
    std::lock_guard lock(state().mutex);
    if (level < state().level) return;
    sink = state().sink;
  }
  // Called without the lock: a Python sink takes the GIL, and a thread that holds the GIL may log.
  if (sink) {
    sink(level, line);
  } else {
    std::fprintf(stderr, "poise %s: %s\n", kNames[static_cast<int>(level)], line.c_str());
  }
}

}  // namespace poise::log
