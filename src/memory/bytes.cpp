// Byte counts as people write and read them.
#include <array>
#include <cmath>
#include <cstdio>

#include "poise/config.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {

std::int64_t parse_bytes(const std::string& text) {
  std::int64_t bytes = 0;
  if (config::read_bytes(text, bytes)) return bytes;
  fail("memory", "cannot read a number of bytes from \"", text,
       "\"; write a number below 2^63 with one of the units B, KB, MB, GB, TB (powers of 1000) or "
       "KiB, MiB, GiB, TiB (powers of 1024), for example \"1.5GiB\"");
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array kNames = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes > -1024 && bytes < 1024) return join(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // 1023.995 would be printed as 1024.00.
  while (std::abs(value) >= 1023.995 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, "%.2f %s", value, kNames[unit]);
  return text;
}

}  // namespace poise::memory
