// Key functions of the error types, and the message of a failed POISE_CHECK.
#include "poise/error.h"

namespace poise {

Error::~Error() = default;
Bug::~Bug() = default;

void detail::check_failed(const char* expression, const char* file, int line,
                          const std::string& message) {
  throw Bug(join("[poise] internal check failed: ", expression, " at ", file, ':', line,
                 message.empty() ? "" : ": ", message,
                 "; this is a bug in poise, please report it"));
}

}  // namespace poise
