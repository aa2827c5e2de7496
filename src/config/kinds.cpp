// The kinds of values: ranges, byte counts, names from a list.
#include "config/kinds.h"

#include <algorithm>

namespace poise::config {
namespace {

// Shortest text that reads back as the same number.
std::string number_text(double value) { return Json(value).dump(); }

bool clean(const std::string& text) {
  // Control characters (NUL above all) have no place in names and paths.
  return std::none_of(text.begin(), text.end(),
                      [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

bool read_integer(const Json& value, std::int64_t& out) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() > static_cast<std::uint64_t>(kNoMaximum)) {
    return false;
  }
  out = value.get<std::int64_t>();
  return true;
}

bool read_text(const Json& value, std::string& out) {
  if (!value.is_string() || !clean(value.get_ref<const std::string&>())) return false;
  out = value.get<std::string>();
  return true;
}

template <class T, class Read>
bool read_list(const Json& value, std::vector<T>& out, Read read) {
  if (!value.is_array()) return false;
  std::vector<T> items;
  for (const auto& element : value) {
    T item;
    if (!read(element, item)) return false;
    items.push_back(std::move(item));
  }
  out = std::move(items);
  return true;
}

}  // namespace

bool Range::holds(double value) const {
  if (!std::isfinite(value)) return false;
  const bool open_at_low = ends == Ends::open || ends == Ends::open_low;
  const bool open_at_high = ends == Ends::open || ends == Ends::open_high;
  return (open_at_low ? value > low : value >= low) &&
         (open_at_high ? value < high : value <= high);
}

std::string Range::words() const {
  const bool open_at_low = ends == Ends::open || ends == Ends::open_low;
  const bool open_at_high = ends == Ends::open || ends == Ends::open_high;
  std::string out = (open_at_low ? "> " : ">= ") + number_text(low);
  if (std::isfinite(high)) out += (open_at_high ? ", < " : ", <= ") + number_text(high);
  return out;
}

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) out += i + 1 == names.size() ? " or " : ", ";
    out += names[i];
  }
  return out;
}

Kind<bool> flag() {
  auto kind = plain_kind<bool>("boolean");
  kind.allowed = "true or false";
  kind.decode = [](const Json& value, const std::string&, bool& out) {
    if (!value.is_boolean()) return false;
    out = value.get<bool>();
    return true;
  };
  return kind;
}

Kind<std::int64_t> integer(std::int64_t low, std::int64_t high) {
  auto kind = plain_kind<std::int64_t>("integer");
  kind.allowed = ">= " + std::to_string(low);
  if (high != kNoMaximum) kind.allowed += ", <= " + std::to_string(high);
  kind.decode = [low, high](const Json& value, const std::string&, std::int64_t& out) {
    std::int64_t number = 0;
    if (!read_integer(value, number) || number < low || number > high) return false;
    out = number;
    return true;
  };
  return kind;
}

Kind<std::uint64_t> unsigned_integer() {
  auto kind = plain_kind<std::uint64_t>("integer");
  kind.allowed = ">= 0, < 2^64";
  kind.decode = [](const Json& value, const std::string&, std::uint64_t& out) {
    if (!value.is_number_integer()) return false;
    if (!value.is_number_unsigned() && value.get<std::int64_t>() < 0) return false;
    out = value.get<std::uint64_t>();
    return true;
  };
  return kind;
}

Kind<std::int64_t> byte_count() {
  auto kind = plain_kind<std::int64_t>("bytes");
  kind.allowed = "a number of bytes >= 0 or text such as \"20GiB\", \"512MiB\", \"1.5GB\"";
  kind.decode = [](const Json& value, const std::string&, std::int64_t& out) {
    std::int64_t bytes = 0;
    if (value.is_string()) {
      if (!read_bytes(value.get_ref<const std::string&>(), bytes)) return false;
    } else if (!read_integer(value, bytes) || bytes < 0) {
      return false;
    }
    out = bytes;
    return true;
  };
  return kind;
}

Kind<double> number(Range range) {
  auto kind = plain_kind<double>("number");
  kind.allowed = range.words();
  kind.decode = [range](const Json& value, const std::string&, double& out) {
    if (!value.is_number() || !range.holds(value.get<double>())) return false;
    out = value.get<double>();
    return true;
  };
  return kind;
}

Kind<double> number_or(double special, const std::string& meaning, Range range) {
  Kind<double> kind = number(range);
  kind.allowed += ", or " + number_text(special) + " for " + meaning;
  kind.decode = [special, inner = kind.decode](const Json& value, const std::string& path,
                                               double& out) {
    if (value.is_number() && value.get<double>() == special) {
      out = special;
      return true;
    }
    return inner(value, path, out);
  };
  return kind;
}

Kind<std::string> text() {
  auto kind = plain_kind<std::string>("string");
  kind.decode = [](const Json& value, const std::string&, std::string& out) {
    return read_text(value, out);
  };
  return kind;
}

Kind<std::string> filled_text() {
  Kind<std::string> kind = text();
  kind.allowed = "not empty";
  kind.decode = [](const Json& value, const std::string&, std::string& out) {
    return value != "" && read_text(value, out);
  };
  return kind;
}

Kind<std::string> choice(std::vector<std::string> names) {
  auto kind = plain_kind<std::string>("string");
  kind.allowed = listed(names);
  kind.decode = [names](const Json& value, const std::string&, std::string& out) {
    return read_text(value, out) && std::find(names.begin(), names.end(), out) != names.end();
  };
  return kind;
}

Kind<std::vector<std::string>> texts() {
  auto kind = plain_kind<std::vector<std::string>>("list of strings");
  kind.decode = [](const Json& value, const std::string&, std::vector<std::string>& out) {
    return read_list(value, out, [](const Json& item, std::string& to) {
      return item != "" && read_text(item, to);
    });
  };
  return kind;
}

Kind<std::vector<std::int64_t>> integers(std::int64_t low) {
  auto kind = plain_kind<std::vector<std::int64_t>>("list of integers");
  kind.allowed = ">= " + std::to_string(low);
  kind.decode = [low](const Json& value, const std::string&, std::vector<std::int64_t>& out) {
    return read_list(value, out, [low](const Json& item, std::int64_t& to) {
      return read_integer(item, to) && to >= low;
    });
  };
  return kind;
}

}  // namespace poise::config
