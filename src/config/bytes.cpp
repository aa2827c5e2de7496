// Numbers of bytes as people write them: "20GiB", "1.5GB", "1048576".
#include <charconv>
#include <cmath>
#include <string_view>

#include "poise/config.h"

namespace poise::config {
namespace {

struct Unit {
  std::string_view name;  // lower case
  double bytes;
};
constexpr Unit kUnits[] = {
    {"", 1},
    {"b", 1},
    {"kb", 1e3},
    {"mb", 1e6},
    {"gb", 1e9},
    {"tb", 1e12},
    {"kib", 1024.0},
    {"mib", 1048576.0},
    {"gib", 1073741824.0},
    {"tib", 1099511627776.0},
};

}  // namespace

bool read_bytes(const std::string& text, std::int64_t& bytes) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc() || !(number >= 0)) return false;

  std::string unit;
  for (const char* at = rest; at != end; ++at) {
    if (*at == ' ' && unit.empty()) continue;
    unit += *at >= 'A' && *at <= 'Z' ? static_cast<char>(*at - 'A' + 'a') : *at;
  }
  for (const auto& known : kUnits) {
    if (unit != known.name) continue;
    const double total = std::floor(number * known.bytes);
    if (!(total < 9223372036854775808.0)) return false;  // 2^63
    bytes = static_cast<std::int64_t>(total);
    return true;
  }
  return false;
}

}  // namespace poise::config
