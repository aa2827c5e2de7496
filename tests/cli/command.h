// Runs a command line in this process and keeps what it printed.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "poise/cli.h"

namespace poise::cli {

struct Outcome {
  int code;
  std::string out;
  std::string err;
};

inline Outcome command(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "poise");
  std::vector<const char*> argv;
  for (const auto& argument : arguments) argv.push_back(argument.c_str());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int code = run(static_cast<int>(argv.size()), argv.data());
  Outcome outcome{code, ::testing::internal::GetCapturedStdout(),
                  ::testing::internal::GetCapturedStderr()};
  return outcome;
}

}  // namespace poise::cli
