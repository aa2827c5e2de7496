// Runs that others published: what their frameworks hold and how fast they are, from the same
// counting as our own plans, so that it can be scored where we cannot measure
// (docs/planner_scores.md). Nothing here is fitted to those runs but one offset per meter and one
// efficiency per device.
#pragma once

#include <string>
#include <vector>

#include "poise/plan.h"

namespace poise::plan::published {

enum class Sharding { replicas, deepspeed, fsdp, megatron };
// What a block keeps for its backward.
enum class Kept {
  all,
  no_scores,     // attention's scores are made again
  no_gelu,       // the output of the GELU is made again
  operators,     // attention's output and every second matrix product (torchtitan's "op")
  other_blocks,  // every second block keeps all, the others their input
  input
};
// `device`: what the driver reads. `fits`: what must fit, whoever reads it; near the end the
// allocator gives back what it only keeps.
enum class Meter { allocated, active, reserved, device, fits };
// `fused`: logits and their gradient in the model's type; `in_place`: one of them.
enum class Head { whole, chunked, fused, in_place, none };

// One run, per rank where it says so.
struct Run {
  std::string id;
  Transformer model;
  Device device;
  double sequence = 0, micro_batch = 1, accumulation = 1;
  int world = 1, dp = 1, tp = 1, pp = 1, vpp = 1, cp = 1;
  bool sequence_parallel = false, keeps_inputs_whole = false, autocast = false, fused_mlp = false;
  Sharding sharding = Sharding::replicas;
  int stage = 0;
  double shards = 1;  // ranks that states are sharded over
  bool keeps_gathered = false;
  // Bytes of an element.
  double parameter = 2, gradient = 2, master = 4, moments = 8, compute = 2;
  bool fp8 = false;
  double trained = 1;  // share of the parameters
  Kept kept = Kept::all;
  bool fused_attention = false, compiled = false, dropout = false;
  bool offloads_optimizer = false, offloads_states = false, offloads_activations = false;
  bool updates_in_backward = false;
  Head head = Head::whole;
  Meter meter = Meter::allocated;
};

// Bytes at the peak as the run's meter reads them, the meter's offset included.
double peak_bytes(const Run& run);
// What the meter counts beside the allocator's bytes: context, libraries, communicators.
double meter_offset(const Run& run);

// Tokens per second of each device.
double tokens_per_second(const Run& run);
double device_constant(const Device& device);

// One row of a table of runs (tests/plan/cases/README.md has the columns); what is missing or empty
// takes its usual value. Without a shape, a micro-batch or a known device nothing is predicted.
struct Row {
  std::string id;
  Run run;
  bool predictable = false;
};
// Throws Error where the file cannot be read or has no column case_id.
std::vector<Row> read_table(const std::string& path);

}  // namespace poise::plan::published
