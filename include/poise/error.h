// The two kinds of failure: Error for what users and environments do, POISE_CHECK for our own bugs.
// Torch-free. docs/errors.md says which is which.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "poise/export.h"

namespace poise {

// Bad input, missing file, lost peer. Message: "[room] what happened: value; what to do".
class POISE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
};

// A broken promise inside poise; please report it.
class POISE_API Bug : public std::logic_error {
 public:
  using std::logic_error::logic_error;
  ~Bug() override;
};

// Joins its arguments with operator<< into one string.
template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws Error. `room` is the folder that speaks, for example "config".
template <class... Parts>
[[noreturn]] void fail(const char* room, const Parts&... parts) {
  throw Error(join('[', room, "] ", parts...));
}

namespace detail {
[[noreturn]] POISE_API void check_failed(const char* expression, const char* file, int line,
                                         const std::string& message);
}  // namespace detail
}  // namespace poise

#define POISE_CHECK(condition, ...)                                    \
  (static_cast<bool>(condition)                                        \
       ? static_cast<void>(0)                                          \
       : ::poise::detail::check_failed(#condition, __FILE__, __LINE__, \
                                       ::poise::join("" __VA_OPT__(, ) __VA_ARGS__)))
