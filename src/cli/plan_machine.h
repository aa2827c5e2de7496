// The machine a plan is for: known devices, described ones, and this machine as it was measured.
#pragma once

#include <iosfwd>
#include <string>

#include "poise/plan.h"

namespace poise::cli {

// The CPU of this machine: with the rates of `path`, or of the usual file, where
// `poise plan --calibrate` wrote them; else with those of the table, which are a guess.
plan::Device this_cpu(const std::string& path = "");
// The GPU that it measured. Throws Error where it has not.
plan::Device this_gpu(const std::string& path = "");
bool is_measured(const plan::Device& device);

// Measures the CPU with this number of threads, the disk and the first GPU, where there is one, and
// writes their rates. Returns the file's path.
std::string calibrate(const std::string& path, std::ostream& out);

}  // namespace poise::cli
