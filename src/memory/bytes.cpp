// Byte counts as people write and read them.
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr Unit kUnits[] = {
    {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
    {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
};

[[noreturn]] void refuse(const std::string& text, const char* why) {
  fail(
      "memory", "cannot read a number of bytes from \"", text, "\": ", why,
      "; write a number with one of the units B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, "
      "TiB (powers of 1024), for example \"1.5GiB\"");
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool same_letters(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (lower(a[i]) != lower(b[i])) return false;
  }
  return true;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

double unit_bytes(const std::string& text, std::string_view unit) {
  for (const Unit& known : kUnits) {
    if (same_letters(known.name, unit)) return known.bytes;
  }
  refuse(text, "unknown unit");
}

}  // namespace

std::int64_t parse_bytes(const std::string& text) {
  const std::string_view written = trimmed(text);
  const char* end = written.data() + written.size();
  if (written.empty()) refuse(text, "it is empty");
  // from_chars also takes "inf" and "-1".
  if (written[0] < '0' || written[0] > '9') refuse(text, "it does not start with a digit");
  long double number = 0;  // long: every 63-bit count of bytes stays exact
  const auto [rest, error] = std::from_chars(written.data(), end, number, std::chars_format::fixed);
  if (error != std::errc()) refuse(text, "the number is out of range");
  const std::string_view unit = trimmed({rest, static_cast<std::size_t>(end - rest)});
  const long double bytes = std::floor(number * static_cast<long double>(unit_bytes(text, unit)));
  if (!(bytes <= static_cast<long double>(std::numeric_limits<std::int64_t>::max()))) {
    refuse(text, "it is more than 2^63 - 1 bytes");
  }
  return static_cast<std::int64_t>(bytes);
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
