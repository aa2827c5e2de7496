// The few kinds of JSON that a safetensors header is made of, read from bytes that may be anything.
// Nothing recurses and nothing is allocated but the strings that come out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace poise::state {

class JsonScanner {
 public:
  // `file`: named in errors, which are "[state] <file> ...".
  JsonScanner(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  void expect(char sign);  // after white space
  bool accept(char sign);
  std::string string();
  std::uint64_t number();                // a whole one, 0 or more
  std::vector<std::uint64_t> numbers();  // [1, 2]
  void end();                            // nothing but white space is left

  [[noreturn]] void refuse(const std::string& why) const;

 private:
  void skip_space();
  char next();
  unsigned code_unit();
  void escape(std::string& out);

  std::string_view text_;
  const std::string& file_;
  std::size_t at_ = 0;
};

bool is_utf8(std::string_view text);
void append_utf8(std::string& out, unsigned code);
// With its quotes; throws Error where `text` is no UTF-8.
std::string json_text(const std::string& text);

}  // namespace poise::state
