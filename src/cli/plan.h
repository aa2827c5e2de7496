// `poise plan`: what a run will hold and how long it will take, and the fastest plan that fits.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace poise::cli {

struct PlanArguments {
  std::string file;   // a run.json; empty: the model below
  std::string model;  // a known name, or a file that describes one
  std::string gpus;   // "8xH100-80GB"
  std::int64_t sequence = 0;
  std::int64_t global_batch = 0;
  std::int64_t micro_batch = 0;   // 0: searched
  std::string memory;             // "20GiB"; empty: what the device has
  std::string precision;          // bf16, bf16-autocast, fp32
  std::vector<std::string> runs;  // tables of published runs, to predict instead
  bool json = false;
};

// Returns the exit code: 0; 1 where no plan fits. Throws Error.
int plan(const PlanArguments& arguments, std::ostream& out);

}  // namespace poise::cli
