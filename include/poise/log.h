// Log lines of the runtime. Torch-free. Lines go to one sink: standard error by default; the Python
// binding sends them to the logging module, so that they do not break a progress bar.
#pragma once

#include <functional>
#include <string>

#include "poise/error.h"
#include "poise/export.h"

namespace poise::log {

enum class Level { debug, info, warning, error };

using Sink = std::function<void(Level, const std::string&)>;

// Replaces the sink and returns the old one; an empty function restores standard error.
POISE_API Sink set_sink(Sink sink);

// Lines below `level` are dropped (default: info; POISE_LOG=debug|info|warning|error sets it).
POISE_API void set_level(Level level);

POISE_API void write(Level level, const std::string& line);

template <class... Parts>
void info(const Parts&... parts) {
  write(Level::info, join(parts...));
}
template <class... Parts>
void warning(const Parts&... parts) {
  write(Level::warning, join(parts...));
}

}  // namespace poise::log
