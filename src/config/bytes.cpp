// Numbers of bytes as people write them: "20GiB", "1.5 GB", "1048576".
#include <charconv>
#include <cmath>
#include <string_view>

#include "poise/config.h"

namespace poise::config {
namespace {

struct Unit {
  std::string_view name;  // lower case
  long double bytes;
};
constexpr Unit kUnits[] = {
    {"", 1},      {"b", 1},        {"kb", 1e3},     {"mb", 1e6},     {"gb", 1e9},
    {"tb", 1e12}, {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40},
};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

}  // namespace

bool read_bytes(const std::string& text, std::int64_t& bytes) {
  const std::string_view written = trimmed(text);
  // from_chars also takes "inf" and "-1".
  if (written.empty() || written[0] < '0' || written[0] > '9') return false;
  const char* end = written.data() + written.size();
  long double number = 0;  // long: every 63-bit count stays exact
  const auto [rest, error] = std::from_chars(written.data(), end, number, std::chars_format::fixed);
  if (error != std::errc()) return false;

  const auto unit = lower_case(trimmed({rest, static_cast<std::size_t>(end - rest)}));
  for (const auto& known : kUnits) {
    if (unit != known.name) continue;
    const long double total = std::floor(number * known.bytes);
    if (!(total < 0x1p63L)) return false;
    bytes = static_cast<std::int64_t>(total);
    return true;
  }
  return false;
}

}  // namespace poise::config
