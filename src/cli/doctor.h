// What this machine, this build and this group of ranks look like to poise.
#pragma once

#include <ostream>

namespace poise::cli {

// Prints versions, bandwidths and a self-test of the stages, on rank 0; under a minute. All ranks.
// Throws Error where the self-test fails or the group does not come together.
void doctor(std::ostream& out);

// "poise 0.1.0 (torch 2.11.0)"
const char* version_line();

}  // namespace poise::cli
