// Scanning.
#include "state/json_scanner.h"

#include <cstdio>
#include <limits>

#include "poise/error.h"

namespace poise::state {

void JsonScanner::refuse(const std::string& why) const {
  fail("state", file_, " is damaged: ", why, " at byte ", at_,
       " of its header; load another save, or get the file again");
}

void JsonScanner::skip_space() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
    ++at_;
  }
}

char JsonScanner::next() {
  if (at_ >= text_.size()) refuse("it ends too early");
  return text_[at_++];
}

void JsonScanner::expect(char sign) {
  if (!accept(sign)) refuse(join("no '", sign, "'"));
}

bool JsonScanner::accept(char sign) {
  skip_space();
  if (at_ >= text_.size() || text_[at_] != sign) return false;
  ++at_;
  return true;
}

void JsonScanner::end() {
  skip_space();
  if (at_ != text_.size()) refuse("something follows it");
}

unsigned JsonScanner::code_unit() {
  unsigned code = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = next();
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) refuse("a wrong \\u in a string");
    code = code * 16 + static_cast<unsigned>(digit);
  }
  return code;
}

void JsonScanner::escape(std::string& out) {
  const char c = next();
  switch (c) {
    case '"':
    case '\\':
    case '/':
      out += c;
      return;
    case 'b':
      out += '\b';
      return;
    case 'f':
      out += '\f';
      return;
    case 'n':
      out += '\n';
      return;
    case 'r':
      out += '\r';
      return;
    case 't':
      out += '\t';
      return;
    case 'u':
      break;
    default:
      refuse("a wrong escape in a string");
  }
  unsigned code = code_unit();
  if (code >= 0xDC00 && code < 0xE000) refuse("half a character in a string");
  if (code >= 0xD800 && code < 0xDC00) {
    if (next() != '\\' || next() != 'u') refuse("half a character in a string");
    const unsigned low = code_unit();
    if (low < 0xDC00 || low >= 0xE000) refuse("half a character in a string");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  append_utf8(out, code);
}

std::string JsonScanner::string() {
  expect('"');
  std::string out;
  for (;;) {
    const char c = next();
    if (c == '"') break;
    if (static_cast<unsigned char>(c) < 0x20) refuse("a control character in a string");
    if (c == '\\') {
      escape(out);
    } else {
      out += c;
    }
  }
  if (!is_utf8(out)) refuse("a string that is no UTF-8");
  return out;
}

std::uint64_t JsonScanner::number() {
  skip_space();
  const auto is_digit = [&] {
    return at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9';
  };
  if (!is_digit()) refuse("no whole number");
  const bool zero = text_[at_] == '0';
  std::uint64_t value = 0;
  int digits = 0;
  for (; is_digit(); ++at_, ++digits) {
    const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
    if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) {
      refuse("a number beyond 2^64");
    }
    value = value * 10 + digit;
  }
  if (zero && digits > 1) refuse("a number that begins with 0");
  if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
    refuse("a number that is not whole");
  }
  return value;
}

std::vector<std::uint64_t> JsonScanner::numbers() {
  std::vector<std::uint64_t> values;
  expect('[');
  if (accept(']')) return values;
  do {
    values.push_back(number());
  } while (accept(','));
  expect(']');
  return values;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const int more = first < 0x80                    ? 0
                     : first >= 0xC2 && first < 0xE0 ? 1
                     : first >= 0xE0 && first < 0xF0 ? 2
                     : first >= 0xF0 && first < 0xF5 ? 3
                                                     : -1;
    if (more < 0 || text.size() - i <= static_cast<std::size_t>(more)) return false;
    unsigned code = more == 0 ? first : first & (0x3Fu >> more);
    for (int k = 1; k <= more; ++k) {
      const auto byte = static_cast<unsigned char>(text[i + static_cast<std::size_t>(k)]);
      if ((byte & 0xC0) != 0x80) return false;
      code = code << 6 | (byte & 0x3Fu);
    }
    const bool too_long = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
    if (too_long || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    i += static_cast<std::size_t>(more) + 1;
  }
  return true;
}

void append_utf8(std::string& out, unsigned code) {
  const auto byte = [&](unsigned value) { out += static_cast<char>(value); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | code >> 6);
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | code >> 12);
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | code >> 18);
    byte(0x80 | (code >> 12 & 0x3F));
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

std::string json_text(const std::string& text) {
  if (!is_utf8(text)) {
    fail("state", "a name or value to save is no UTF-8: '", text, "'; give it another one");
  }
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out += '"';
}

}  // namespace poise::state
