// The command line `poise`, as a function: the C++ program and the console script of the Python
// package are the same few lines around it.
#pragma once

#include "poise/export.h"

namespace poise::cli {

// Runs `poise <arguments>` and returns the exit code: 0 done; 1 an Error, its message on standard
// error; 2 wrong arguments; 130 ended by Ctrl-C (143 by SIGTERM) after the micro-batch that ran.
// Never calls exit. While `train` runs, the handlers of SIGINT and SIGTERM are its own.
POISE_API int run(int argc, const char* const* argv);

}  // namespace poise::cli
