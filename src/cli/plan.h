// `poise plan`: what a run will hold and how long it will take, and the fastest plan that fits.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "poise/cli.h"

namespace poise::cli {

struct PlanArguments {
  std::string file;   // a run.json; empty: the model below
  std::string model;  // a known name, or a file that describes one
  Devices devices;
  std::int64_t sequence = 0;
  std::int64_t global_batch = 0;
  std::int64_t micro_batch = 0;  // 0: searched
  std::int64_t shard_ranks = 0;  // of a group that shards; 0: searched
  std::string memory;            // "20GiB"; empty: what the device has
  std::string precision;         // bf16, bf16-autocast, fp32
  std::string offload;           // host or file: what may lie there is searched too
  double price = 0;              // of a device, by the hour
  double utilisation = 1;
  bool calibrate = false;         // measures this machine instead
  std::vector<std::string> runs;  // tables of published runs, to predict instead
  std::string html;               // a file that gets a page with drawings
  bool levers = false;
  bool json = false;
};

// Returns the exit code: 0; 1 where no plan fits. Throws Error.
int plan(const PlanArguments& arguments, std::ostream& out);

}  // namespace poise::cli
