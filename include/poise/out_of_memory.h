// Which exceptions say that memory ran out: those that a smaller micro-batch may not meet.
#pragma once

#include <exception>
#include <string>

#include "poise/export.h"

namespace poise {

// torch's OutOfMemoryError, or what the check below knows to be one.
POISE_API bool is_out_of_memory(const std::exception_ptr& error);

// For errors of another language that pass through; null (the default): there are none. Returns the
// old one.
using OutOfMemoryCheck = bool (*)(const std::exception_ptr& error);
POISE_API OutOfMemoryCheck set_out_of_memory_check(OutOfMemoryCheck check);

// Throws torch's OutOfMemoryError (in Python torch.OutOfMemoryError).
[[noreturn]] POISE_API void throw_out_of_memory(const std::string& message);

}  // namespace poise
