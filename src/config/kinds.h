// What a value of the configuration may be: one Kind per sort of value. A Kind decides what it
// accepts, says it in words, and prints it back; the schema puts a Kind to every key.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "poise/config.h"

namespace poise::config {

using Json = nlohmann::ordered_json;

template <class T>
struct Kind {
  std::string type;     // "integer"
  std::string allowed;  // ">= 1"; empty: anything of the type
  // False where the value is not allowed. `path` is for kinds with keys of their own inside.
  std::function<bool(const Json& value, const std::string& path, T& out)> decode;
  std::function<Json(const T&)> encode;
};

// A Kind for what JSON itself can hold.
template <class T>
Kind<T> plain_kind(const char* type, std::string allowed = "") {
  return {type, std::move(allowed), nullptr, [](const T& value) { return Json(value); }};
}

inline constexpr std::int64_t kNoMaximum = std::numeric_limits<std::int64_t>::max();

// Ends of a range of numbers and whether they belong to it.
struct Range {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  enum class Ends { closed, open_low, open_high, open } ends = Ends::closed;

  bool holds(double value) const;  // false for NaN and infinities
  std::string words() const;
};

Kind<bool> flag();
Kind<std::int64_t> integer(std::int64_t low, std::int64_t high = kNoMaximum);
Kind<std::uint64_t> unsigned_integer();
Kind<std::int64_t> byte_count();  // a number of bytes or text such as "20GiB"
Kind<double> number(Range range = {});
Kind<double> number_or(double special, const std::string& meaning, Range range);
Kind<std::string> text();
Kind<std::string> filled_text();
Kind<std::string> choice(std::vector<std::string> names);
Kind<std::vector<std::string>> texts();
Kind<std::vector<std::int64_t>> integers(std::int64_t low);

// "a, b or c"
std::string listed(const std::vector<std::string>& names);

template <class E>
Kind<E> enumeration(std::vector<std::pair<std::string, E>> members) {
  std::vector<std::string> names;
  for (const auto& member : members) names.push_back(member.first);
  Kind<E> kind;
  kind.type = "string";
  kind.allowed = listed(names);
  kind.decode = [members](const Json& value, const std::string&, E& out) {
    for (const auto& [name, member] : members) {
      if (value == name) {
        out = member;
        return true;
      }
    }
    return false;
  };
  kind.encode = [members](const E& value) {
    for (const auto& [name, member] : members) {
      if (member == value) return Json(name);
    }
    return Json(nullptr);  // a number that is no member: refused by decode
  };
  return kind;
}

}  // namespace poise::config
