// Planning: what a training run will hold and how long an update will take, before anything is
// allocated, and which plan is the fastest that fits. The accounts are those of the memory ledger,
// so a prediction and what was measured lie side by side. Torch-free. docs/planner.md explains the
// formulas and how far they were right.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "poise/config.h"
#include "poise/export.h"
#include "poise/memory_accounts.h"

namespace poise::plan {

// ---- The model

enum class Mlp { gelu, gated };  // two matrices, or three (SwiGLU, GeGLU)

// A decoder-only transformer in numbers.
struct Transformer {
  std::string name;
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;    // 0: as many as heads
  std::int64_t head_width = 0;  // 0: width / heads
  std::int64_t ffn = 0;
  std::int64_t vocabulary = 0;
  Mlp mlp = Mlp::gated;
  bool tied = false;      // the head's matrix is the embedding's
  bool biases = false;    // linear layers and norms have them (GPT-2); else RMS norms, no biases
  bool head_norm = true;  // a norm before the head
  std::int64_t positions = 0;  // learned positions; 0: none
};

// Throws Error where the numbers make no model.
POISE_API void check(const Transformer& model);
POISE_API std::int64_t parameters(const Transformer& model);
// FLOPs of one forward over `sequence` tokens, multiply and add counted; attention in full.
POISE_API double forward_flops(const Transformer& model, std::int64_t sequence);
POISE_API const std::vector<Transformer>& known_transformers();
// Throws Error that lists the known names.
POISE_API Transformer known_transformer(const std::string& name);
// The built-in model of `poise train`.
POISE_API Transformer byte_gpt(const config::ModelPolicy& policy);

// Parameters that are laid out, gathered and joined together (a unit's).
struct Flat {
  std::string name;
  std::int64_t elements = 0;  // each tensor padded to 256
  std::int64_t frozen = 0;    // beside them, without states and gradients
  std::int64_t factored = 0;  // rows and columns of its matrices, elements of its vectors
};

enum class Recompute : std::uint8_t { none, whole, selective };

// What running a link in one of the three ways of Recompute takes, in bytes. Peaks hold all of the
// link's own: its input, what it saves, the gradient that came in.
struct Pass {
  std::int64_t saved = 0;  // from its forward to its backward, the input included
  std::int64_t forward_peak = 0;
  std::int64_t backward_peak = 0;  // a second forward included
  double again_flops = 0;          // of the second forward
  double sent = 0;           // of what it saves: leaves in forward and comes back for backward
  std::int64_t leaving = 0;  // of that: still here until something else leaves
};

// One step of the forward, at one micro-batch: an embedding, a block, a head. Backward goes through
// the links in reverse order.
struct Link {
  std::string name;
  int flat = -1;       // whose parameters it needs; -1: those of the rest only
  bool block = false;  // may be recomputed
  std::array<Pass, 3> passes;
  std::array<Pass, 3> away;        // the same where what it saves lies on the host or in a file
  double flops = 0;                // of its forward
  double moved = 0;                // bytes its forward reads and writes, where they were traced
  std::int64_t held_gradient = 0;  // of a tied matrix: waits from its backward to the end
  std::int64_t casts = 0;  // 16-bit copies of fp32 weights that autocast saves unless recomputed
};

// A model at one micro-batch, sequence and precision. A list of units that was traced elsewhere is
// given in the same form.
struct Chain {
  std::vector<Flat> flats;  // in order of units
  int rest = -1;            // flat of what belongs to no block: whole through every micro-batch
  std::vector<Link> links;  // in order of forward
};

struct Shape {
  std::int64_t micro_batch = 1;  // sequences
  std::int64_t sequence = 1;     // tokens
  std::int64_t loss_chunk_tokens = 0;
};

// On the CPU byte counts are those of torch's CPU operators; on a GPU those of fused attention with
// the norms as transformers writes them.
enum class Place { cpu, gpu };
// What torch's operators on the CPU take beside their results (cpu_operators() in
// poise/module_plan.h sees it on this machine).
struct CpuOperators {
  int threads = 1;
  // Bytes for each element of a bf16 matrix product: 4 where the processor multiplies bf16 itself
  // and oneDNN sums in fp32 before it rounds.
  std::int64_t bf16_product = 0;
  // Bytes for panels of its operands, where kernels of matrix tiles copy them: of a product with so
  // many rows that sums over `depth`; of a weight's gradient, the first operand lies transposed.
  // Null: none.
  std::function<std::int64_t(std::int64_t rows, std::int64_t depth, bool of_weight)> bf16_panels;
};
POISE_API Chain chain(const Transformer& model, const Shape& shape,
                      const config::PrecisionPolicy& precision, Place place,
                      const CpuOperators& cpu = {});

// A model that was run with tensors of no memory instead of described: its chain at several
// micro-batches. At others every figure lies on the line through the two nearest ones; peaks are
// maxima of lines, so between two that is no less than the truth.
struct Traced {
  std::vector<std::int64_t> micro_batches;  // rising
  std::vector<Chain> chains;                // at them
};
POISE_API Chain chain(const Traced& traced, std::int64_t micro_batch);

// ---- Memory

// How one update is run.
struct Choice {
  std::int64_t micro_batch = 1;
  std::int64_t accumulation = 1;
  int ranks = 1;
  int shard_ranks = 0;  // of a group that shards, replicated by the other groups; 0: all ranks
  int stage = 0;
  bool reduces_every = false;  // gradients are joined in every micro-batch
  bool keep_gathered = false;
  bool overlap = true;
  config::DType gradient_dtype = config::DType::fp32;  // on the wire
  bool ranks_reserve = true;  // memory for sums over ranks: as on CPUs, not as NCCL does
  std::int64_t loss_chunk_tokens = 0;
  Recompute recompute = Recompute::none;
  std::vector<bool> recomputed;  // by block
  config::OffloadPolicy offload;
  // Where activations are offloaded: whose, by block; empty: all that forward saves.
  std::vector<bool> activations_of;
};
// Ranks of a group that shards.
POISE_API int shard_ranks(const Choice& choice);

// Bytes per element, by what it is.
struct Widths {
  int parameter = 4;
  int master = 0;         // 0: the parameters are their own
  double moments = 8;     // of blocks of elements: a fraction
  bool factored = false;  // besides, fp32 rows and columns, whole on every rank (Adafactor)
  int accumulator = 4;
  int wire = 4;
};
POISE_API Widths widths(const config::PrecisionPolicy& precision,
                        const config::OptimizerPolicy& optimizer,
                        config::DType gradient_dtype = config::DType::fp32);

using Accounts = std::array<std::int64_t, memory::kAccounts>;
POISE_API std::int64_t total(const Accounts& accounts);

// What a rank holds between updates. `rest`: as in Chain.
POISE_API Accounts states(const std::vector<Flat>& flats, const Choice& choice,
                          const Widths& widths, int rest = -1);

// One moment of an update: the highest of a link's forward or backward, or the end of backward,
// where gradients are joined that nothing was left to hide.
struct Moment {
  std::string name;  // "backward of block 3", "end of the backward"
  Accounts accounts{};
};

struct Memory {
  Accounts held{};         // between updates
  Accounts at_peak{};      // at the highest moment of an update
  std::int64_t peak = 0;   // sum of at_peak
  std::string moment;      // "backward of block 3"
  std::int64_t build = 0;  // highest while the engine is built, the user's whole model included
  std::int64_t highest() const { return build > peak ? build : peak; }
};
POISE_API Memory memory(const Chain& chain, const Choice& choice, const Widths& widths);
// Every moment of an update in its order.
POISE_API std::vector<Moment> moments(const Chain& chain, const Choice& choice,
                                      const Widths& widths);

// The blocks to recompute (whole) such that no moment holds more than `budget` bytes and the second
// forwards take least FLOPs; none where even the best choice holds more. Exact: a dynamic programme
// over what is kept before each block (docs/planner.md).
POISE_API std::optional<std::vector<bool>> cheapest_recompute(const Chain& chain,
                                                              const Choice& choice,
                                                              const Widths& widths,
                                                              std::int64_t budget);
// The least budget that some choice of blocks fits.
POISE_API std::int64_t least_budget(const Chain& chain, const Choice& choice, const Widths& widths);

// ---- The machine

// Rates are those of data sheets, dense; bytes and FLOPs per second.
struct Device {
  std::string name;
  std::int64_t memory = 0;  // what drivers report as usable
  double half_flops = 0;    // bf16/fp16 matrix units
  double float_flops = 0;   // fp32
  double memory_rate = 0;
  double node_rate = 0;     // to a rank of the same node, one direction
  double network_rate = 0;  // per GPU, to other nodes
  double efficiency = 0.5;  // reached share of the peak on large matrices
  Place place = Place::gpu;
  double host_rate = 25e9;    // to memory of the host, one direction
  double file_rate = 2e9;     // to a file of the host
  double host_update = 50e9;  // bytes a second that the host's CPU updates states at, per device
  double overhead = 0;  // seconds of a link, forward and backward, whatever its size; if measured
  double half_tokens = 512;  // of a micro-batch that reaches half the rate
};
POISE_API const std::vector<Device>& known_devices();
POISE_API Device known_device(const std::string& name);

struct Machine {
  Device device;
  int ranks = 1;
  int ranks_per_node = 8;
};
// "8xH100-80GB", "A100-40GB", "1024xH100-80GB" (8 to a node). Throws Error that lists the names.
POISE_API Machine read_machine(const std::string& text);

// Bytes a rank sends, and what the collectives of one update wait for.
struct Traffic {
  double gathers = 0;  // parameters
  double reduces = 0;  // gradients
  double across = 0;   // sums of gradients, to the replicas of the shard
};
// A ring: (W-1)/W of what is moved, W: ranks of a group that shards.
POISE_API Traffic traffic(std::int64_t elements, const Choice& choice, const Widths& widths);

struct Time {
  double forward = 0, backward = 0, recompute = 0;  // seconds of an update
  double exposed = 0;                               // collectives that nothing hides
  double transfers = 0;                             // to host and file that nothing hides
  double update = 0;                                // optimizer
  double total = 0;
};
POISE_API Time time(const Chain& chain, const Choice& choice, const Widths& widths,
                    const config::PrecisionPolicy& precision, const Machine& machine,
                    std::int64_t tokens);

// ---- The search

struct Job {
  Transformer model;             // its name alone where `traced` is given
  std::optional<Traced> traced;  // planned instead: whole logits, blocks kept or recomputed whole
  std::int64_t sequence = 0;
  std::int64_t global_batch = 0;  // sequences of one update, always kept
  config::PrecisionPolicy precision;
  config::OptimizerPolicy optimizer;
  Machine machine;
  std::int64_t budget = 0;       // bytes per rank; 0: the device's memory less `reserve`
  std::int64_t micro_batch = 0;  // 0: searched
  CpuOperators cpu;              // where the device is one
  std::vector<int> stages;       // allowed; empty: all
  // Ranks of a group that shards: allowed; empty: all ranks, and those of a node.
  std::vector<int> shard_ranks;
  std::vector<config::OffloadPolicy> offloads{{}};  // allowed
  std::vector<bool> activations_of;                 // as in Choice
  std::optional<Widths> widths;                     // instead of those of precision and optimizer
  std::int64_t extra_states = 0;  // bytes held beside those of the model: adapters
  // Fixed instead of searched: which blocks are recomputed; tokens of a chunk of logits.
  bool searches_recompute = true;
  Recompute recompute = Recompute::none;
  std::vector<bool> recomputed;
  bool searches_chunk = true;
  std::int64_t loss_chunk_tokens = 0;
};

// Whether states, gradients and parameters may leave the device: not where the optimizer needs sums
// over whole parameters first (adafactor, lamb, lars).
POISE_API bool may_offload(const config::OptimizerPolicy& optimizer);

// What a choice of the job runs.
POISE_API Chain chain(const Job& job, const Choice& choice);
POISE_API Widths widths(const Job& job);

struct Plan {
  Choice choice;
  Memory memory;
  Time time;
};

struct Answer {
  std::int64_t budget = 0;
  std::int64_t floor = 0;  // the smallest budget that some plan fits
  bool fits = false;
  Plan best;                // the fastest that fits; where none does the one of least memory
  std::vector<Plan> front;  // no plan is both faster and smaller: fastest first
  bool has_runner_up = false;
  Plan runner_up;            // the fastest of another stage, recomputation or micro-batch
  std::string why;           // it lost
  std::string dominated_by;  // where nothing fits: the account that is most of the floor
  int candidates = 0;
};
// What the context, libraries and fragmentation of a device take from its memory.
POISE_API std::int64_t reserve(const Device& device);
// Throws Error where the global batch cannot be split over the ranks, with the nearest ones.
POISE_API Answer search(const Job& job);

// The keys of a run.json that make a run follow the choice; `units`: names of the blocks, for a
// choice that is no first n of them; empty: blocks.0, blocks.1, ...
POISE_API std::string settings(const Choice& choice, const std::vector<std::string>& units = {});

// What else would lower the need: offload and more ranks, which train the same, and what changes
// numbers, which is never done unasked.
struct Lever {
  std::string name;
  std::string setting;  // how it is asked for
  bool changes_numbers = false;
  bool fits = false;
  Plan plan;  // the fastest that fits with it; where none does the one of least memory
};
POISE_API std::vector<Lever> levers(const Job& job);

// ---- Cost

struct Price {
  double gpu_hour = 0;     // of one device
  double utilisation = 1;  // share of the paid hours that train
};
struct Cost {
  double month = 0;           // of all devices: 730 hours
  double billion_tokens = 0;  // at the plan's speed
};
// `tokens`: of an update, on all ranks.
POISE_API Cost cost(const Plan& plan, double tokens, const Price& price);

// ---- Runs that others published (docs/planner_scores.md)

struct POISE_API RunPrediction {
  std::string id;
  bool predicted = false;        // its table gives enough to
  double peak_gib = 0;           // of each device, as the run's meter reads it
  double tokens_per_second = 0;  // of each device
  double meter_offset_gib = 0;   // in peak_gib: what the meter counts beside the allocator
  double device_constant = 0;    // in tokens_per_second
};
// The rows of a comma-separated table whose first line names the columns
// (tests/plan/cases/README.md). Throws Error where it cannot be read.
POISE_API std::vector<RunPrediction> predict_runs(const std::string& table);

}  // namespace poise::plan
