// The command line `poise`, as a function: the C++ program and the console script of the Python
// package are the same few lines around it. And what plans of Python share with `poise plan`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "poise/export.h"
#include "poise/plan.h"

namespace poise::cli {

// Runs `poise <arguments>` and returns the exit code: 0 done; 1 an Error, its message on standard
// error; 2 wrong arguments; 130 ended by Ctrl-C (143 by SIGTERM) after the micro-batch that ran.
// Never calls exit. While `train` runs, the handlers of SIGINT and SIGTERM are its own.
POISE_API int run(int argc, const char* const* argv);

// The devices of a plan, as `poise plan` takes them. 0 and empty: as they are known or measured.
struct Devices {
  std::string gpus;           // "8xH100-80GB"; "8xdevice.json" is described there; "1xthis"
  std::int64_t nodes = 0;     // of so many devices; 0: one, or as many as `per_node` make
  std::int64_t per_node = 0;  // 0: 8
  double node_link = 0;       // GB/s between devices of a node
  double network = 0;         // GB/s of each device to other nodes
  std::string machine;        // a file that `poise plan --calibrate` wrote
};

// Throws Error on a device that is not known, and on a file that cannot be read or describes none.
POISE_API plan::Machine machine_of(const Devices& devices);

// The answer as one HTML page that needs nothing but itself; `units` are the names of a traced
// model's blocks.
POISE_API std::string plan_page(const plan::Job& job, const plan::Answer& answer,
                                const std::vector<plan::Lever>& levers, const plan::Price& price,
                                const std::vector<std::string>& units);

// ---- What is said where nothing fits a budget, by every face that plans

// At least so many bytes, rounded up to a hundredth of their unit, as budgets are given: "1.24MiB".
POISE_API std::string budget_text(std::int64_t bytes);

// The levers that would fit, first those that leave the training the same, each with how it is
// asked for and what it would need; where none would, the one that needs least.
POISE_API std::string what_helps(const std::vector<plan::Lever>& levers);

// The floor, what most of it is, what is missing, the nearest budget that works, and what_helps.
POISE_API std::string misfit(const plan::Job& job, const plan::Answer& answer);

}  // namespace poise::cli
