// The settings of a run: one small struct per room, plain and torch-free. A Config is read once
// (Config::from_json...), checked, and const from then on. docs/config.md is generated from the
// schema that reads them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "poise/export.h"

namespace poise {
namespace config {

enum class DType { fp32, bf16, fp16 };

struct BatchPolicy {
  std::int64_t micro_batch_size = 0;  // samples of one forward/backward; 0: open
  std::int64_t accumulation = 0;  // micro-batches of one update on a rank; 0: see accumulation()
  std::int64_t global_batch_size =
      0;                          // samples of one update; 0: micro-batch x accumulation x ranks
  std::int64_t ramp_from = 0;     // micro-batches of the first update on a rank; 0: no ramp
  std::int64_t ramp_updates = 0;  // applied updates over which they grow to the full number
};

enum class LossWeighting {
  tokens,            // a mean weighs as many tokens as it counted (needs counts)
  micro_batch_mean,  // every micro-batch weighs the same
};

struct PrecisionPolicy {
  DType dtype = DType::fp32;       // type of the forward
  DType parameters = DType::fp32;  // type the parameters are kept in; 16-bit ones get fp32 masters
  bool autocast = true;            // torch autocast around forward where dtype is 16-bit
  bool fp32_accumulation = true;   // accumulators of gradients; false: the parameters' type
  double loss_scale = 0;           // fp16 only; 0: dynamic
  double initial_loss_scale = 65536;
  double loss_scale_growth = 2;
  double loss_scale_backoff = 0.5;
  std::int64_t loss_scale_growth_interval = 2000;  // clean updates before it grows
  std::int64_t loss_scale_hysteresis = 1;          // overflows in a row before it shrinks
  double min_loss_scale = 1;
  double max_loss_scale = 4294967296.0;  // 2^32
};

// Parameters whose name matches `match` (shell pattern: * and ?) form a group; first match wins.
struct ParamGroup {
  std::string match;
  double lr_multiplier = 1;
  double weight_decay = -1;  // negative: that of the optimizer
};

struct OptimizerPolicy {
  std::string type = "adamw";  // adamw, adam, adafactor, lamb, lars, lion, sgd
  double lr = 5e-5;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  std::string moments = "fp32";      // adamw, adam: fp32, bf16, 8bit; lion: fp32, 8bit
  double clip_threshold = 1;         // adafactor: largest root mean square of a step
  double decay_rate = -0.8;          // adafactor: 1 - beta2 is the update's number to it
  double eps_square = 1e-30;         // adafactor: added to squares of gradients
  double eps_scale = 1e-3;           // adafactor: floor of what scale_parameter scales by
  bool scale_parameter = false;      // adafactor: lr times the parameter's root mean square
  double trust_coefficient = 0.001;  // lars
  double min_trust = 0;              // lamb: limits of the trust ratio; max 0: none
  double max_trust = 0;
  double momentum = 0;              // sgd, lars
  bool nesterov = false;            // sgd
  std::string lr_scaling = "none";  // linear, sqrt: by the samples of an update over lr_batch_size
  std::int64_t lr_batch_size = 0;   // samples of an update that lr is for
  std::string decay_rule = "matrices";  // matrices: only tensors of 2 or more dimensions; all
  double max_grad_norm = 1;             // global L2 norm; 0: no clipping
  std::vector<ParamGroup> groups;
};

struct SchedulePolicy {
  // constant, linear, cosine, cosine_with_min_lr, inverse_sqrt, warmup_stable_decay, polynomial
  std::string type = "constant";
  std::int64_t warmup_updates = 0;
  std::int64_t total_updates = 0;  // 0: the run's max_updates
  std::int64_t decay_updates = 0;  // warmup_stable_decay: length of the last leg
  double min_lr_ratio = 0;         // floor over the peak
  double power = 1;                // polynomial
};

struct CheckpointingPolicy {
  std::string policy = "none";  // none, every_n, sqrt, first_m, list, selective
  std::int64_t n = 1;  // every_n: every n-th unit is recomputed; first_m: the first n units
  std::vector<std::string> units;  // list: names (shell patterns)
};

enum class OnMisfit { refuse, warn };

struct MemoryPolicy {
  std::int64_t budget_bytes = 0;          // 0: no limit
  OnMisfit on_misfit = OnMisfit::refuse;  // what follows where no plan fits the budget
};

enum class KeepGathered {
  no,      // parameters are whole while their unit needs them
  window,  // once gathered, until the end of the window: less traffic, more memory
};

enum class Reduce {
  automatic,  // last at stages 0 and 1, every at stages 2 and 3
  last,       // gradients are joined once per window, in its last micro-batch
  every,      // in every micro-batch: whole gradients never pile up
};

// Sharding over ranks; with one rank nothing is sharded.
struct ZeroPolicy {
  std::int64_t stage = 0;  // 1: optimizer states, 2: and gradients, 3: and parameters
  Reduce reduce = Reduce::automatic;
  bool overlap = true;                            // gradients travel while backward goes on
  DType gradient_dtype = DType::fp32;             // of gradients on the wire: fp32 or bf16
  KeepGathered keep_gathered = KeepGathered::no;  // stage 3
  std::int64_t persistence_threshold = 0;  // stage 3: parameters of fewer elements stay whole
  std::int64_t shard_group_size = 0;       // ranks that shard among themselves; 0: all of them
};

enum class Offload {
  none,  // on the device
  host,  // in memory of the host
  file,  // in a file
};

enum class OffloadIo { automatic, io_uring, threads };

// What lives away from the device, and how files are read and written.
struct OffloadPolicy {
  Offload optimizer = Offload::none;          // masters and moments
  double optimizer_fraction = 1;              // of them; the rest stays, by whole units
  Offload gradients = Offload::none;          // accumulators: none or host
  Offload parameters = Offload::none;         // shards (at stage 3), or all of them (on one rank)
  Offload activations = Offload::none;        // what forward saves for backward
  std::int64_t activation_min_bytes = 65536;  // of a tensor that travels; smaller ones stay
  std::vector<std::string> activation_units;  // whose; empty: all that forward saves
  std::string directory;                      // of files
  OffloadIo io = OffloadIo::automatic;
  std::int64_t queue_depth = 8;           // blocks in flight, each way
  std::int64_t block_bytes = 1 << 20;     // of one read or write; a multiple of 4096
  std::int64_t staging_bytes = 64 << 20;  // host memory for what an update has on its way
  std::int64_t pinned_budget_bytes = std::int64_t{8} << 30;  // with a GPU; above it: pageable
};

struct CommPolicy {
  double timeout_seconds = 1800;  // a wait for other ranks ends here with an error
};

enum class NonFinite { skip, stop };

struct EnginePolicy {
  LossWeighting loss_weighting = LossWeighting::tokens;
  NonFinite on_nonfinite = NonFinite::skip;  // non-finite loss, or gradient outside fp16
  std::uint64_t seed = 42;
  bool noise_scale = false;  // measured from each window of two micro-batches or more
};

struct ModelPolicy {
  std::string builtin = "byte_gpt";
  std::int64_t layers = 4;
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t sequence_length = 128;
  double dropout = 0;
  std::int64_t loss_chunk_tokens = 0;  // 0: whole logits; else the chunked loss head
};

struct DataPolicy {
  std::vector<std::string> train;       // files or folders, read as bytes
  std::vector<std::string> validation;  // empty: the tail of train
  std::string suffix;                   // of the files taken from folders, for example ".py"
  double validation_fraction = 0.02;
  bool shuffle = true;
  std::int64_t prefetch = 2;  // windows read ahead
};

struct TrainPolicy {
  std::string output_dir = "out";
  std::int64_t max_updates = 100;
  std::int64_t log_every = 10;
  std::int64_t validate_every = 0;  // 0: at the end only
  std::int64_t validation_batches = 8;
  std::int64_t sample_bytes = 0;              // bytes of text generated at the end
  std::vector<std::int64_t> profile_updates;  // [first, last]: a trace of these updates is written
};

// Saving and resuming.
struct StatePolicy {
  std::int64_t save_every = 0;        // updates between two saves of `poise train`; 0: none
  std::int64_t save_total_limit = 0;  // saves that stay, the newest ones; 0: all
  std::int64_t keep_every = 0;        // saves after each n-th update stay besides; 0: none
  bool rehearse = true;               // a save is tried out before the first update
  bool keep_best = false;             // one is made, and stays, after each best validation so far
  std::string resume = "none";        // none, auto: the latest save if there is one; else its path
  bool asynchronous = false;          // saves are written while the training goes on
  std::int64_t staging_bytes = std::int64_t{1} << 30;  // host memory that one may hold
};

// Samples of one forward/backward: what was given, else 1.
POISE_API std::int64_t micro_batch_size(const BatchPolicy& batch);

// Micro-batches of the update after `applied` ones: growing evenly from ramp_from to accumulation()
// over ramp_updates.
POISE_API std::int64_t accumulation_at(const BatchPolicy& batch, std::int64_t ranks,
                                       std::int64_t applied);

// Micro-batches of one update on each of `ranks`: what was given, else global_batch_size /
// (micro_batch_size x ranks), else 1. Throws Error where that does not divide or contradicts.
POISE_API std::int64_t accumulation(const BatchPolicy& batch, std::int64_t ranks = 1);

// Whether gradients are joined in every micro-batch.
POISE_API bool reduces_every_micro_batch(const ZeroPolicy& zero);

// "20GiB", "512MiB", "1.5GB", "1048576" -> bytes; false where the text is none of these.
POISE_API bool read_bytes(const std::string& text, std::int64_t& bytes);

// docs/config.md: every key with its type, default, allowed values and meaning.
POISE_API std::string reference();

}  // namespace config

struct POISE_API Config {
  config::BatchPolicy batch;
  config::PrecisionPolicy precision;
  config::OptimizerPolicy optimizer;
  config::SchedulePolicy schedule;
  config::CheckpointingPolicy checkpointing;
  config::MemoryPolicy memory;
  config::ZeroPolicy zero;
  config::OffloadPolicy offload;
  config::CommPolicy comm;
  config::EnginePolicy engine;
  config::ModelPolicy model;
  config::DataPolicy data;
  config::TrainPolicy train;
  config::StatePolicy state;

  // Reads JSON (// and /* */ comments allowed). Throws Error naming key, value and what is allowed;
  // an unknown or repeated key names the nearest known one.
  // `overrides`: "key=value" each, applied after the text, for example "optimizer.lr=1e-3".
  // `place`: where the text comes from, named in messages about it.
  static Config from_json(const std::string& text, const std::vector<std::string>& overrides = {},
                          const std::string& place = {});
  static Config from_json_file(const std::string& path,
                               const std::vector<std::string>& overrides = {});

  // Throws Error where values contradict each other. from_json calls it; call it for a Config
  // filled by hand.
  void validate() const;

  // Whether the split of the global batch is to be found: memory.budget_bytes and
  // batch.global_batch_size are given, and neither micro-batch nor accumulation.
  bool balance_is_open() const;

  // Every key with its value, as JSON that from_json reads back.
  std::string to_json() const;
};

}  // namespace poise
