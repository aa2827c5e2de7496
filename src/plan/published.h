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
// `whole`: cross-entropy on fp32 copies of the logits; `plain`: in their own type; `fused`: logits
// and their gradient alone; `in_place`: one of them.
enum class Head { whole, plain, chunked, fused, in_place, none };

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
  double table = 0;       // of embeddings, where blocks are kept in fewer bits; 0: as they are
  double activation = 0;  // 0: as `compute`
  bool fp8 = false;
  double trained = 1;  // share of the parameters
  // Frozen parameters lie in one flat with trained ones, so that all of it has gradients.
  bool frozen_gradients = false;
  bool joins_once = false;   // whole gradients wait for the last micro-batch, whatever the stage
  double whole_masters = 0;  // bytes of an element's copy that no stage splits
  bool keeps_frozen_inputs = false;  // of matrices that do not train
  Kept kept = Kept::all;
  bool fused_attention = false, compiled = false, dropout = false;
  bool first_flash = false;       // FlashAttention before its second version
  bool gelu_by_parts = false;     // GELU's tanh form, operation by operation
  bool broadcasts_parts = false;  // each rank's updated parameters go out one after the other
  bool offloads_optimizer = false, offloads_states = false, offloads_activations = false;
  bool updates_in_backward = false;
  bool updates_all_at_once = false;  // a root of all second moments exists beside them
  Head head = Head::whole;
  bool caps_logits = false;  // by a tanh, whose result is kept
  // Stages of the pipeline have as many FLOPs each, the head's counted, instead of as many blocks.
  bool balances_stages = false;
  bool reads_first_stage = false;  // the meter is that of the first stage
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
