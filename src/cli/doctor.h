// What this machine and this build look like to poise.
#pragma once

#include <ostream>

namespace poise::cli {

void doctor(std::ostream& out);

// "poise 0.1.0 (torch 2.11.0)"
const char* version_line();

}  // namespace poise::cli
