// The table of all settings. A new setting is a field in poise/config.h and a row here;
// docs/config.md is then made anew with `poise config --reference`.
#include "config/schema.h"

#include "poise/error.h"

namespace poise::config {
namespace {

using Ends = Range::Ends;

constexpr std::int64_t kLargestCount = std::int64_t{1} << 30;  // products of two still fit

// Path and accessor of a field from one spelling, so that they cannot disagree.
#define POISE_FIELD(field) \
#field, [](auto& owner) -> auto& { return owner.field; }

template <class Owner, class Get, class T>
Key<Owner> row(const char* path, Get get, Kind<T> kind, const char* doc) {
  Key<Owner> key;
  key.path = path;
  key.type = kind.type;
  key.allowed = kind.allowed;
  key.doc = doc;
  key.read = [get, kind](Owner& owner, const Json& value, const std::string& where) {
    T decoded{};
    if (!kind.decode(value, where, decoded)) {
      fail("config", where, " is ", shown(value), "; allowed: ", kind.type,
           kind.allowed.empty() ? "" : ", ", kind.allowed);
    }
    get(owner) = std::move(decoded);
  };
  key.write = [get, kind](const Owner& owner) { return kind.encode(get(owner)); };
  return key;
}

template <class Get, class T>
Key<Config> key(const char* path, Get get, Kind<T> kind, const char* doc) {
  return row<Config>(path, get, std::move(kind), doc);
}

Kind<DType> dtype() {
  return enumeration<DType>({{"fp32", DType::fp32}, {"bf16", DType::bf16}, {"fp16", DType::fp16}});
}

Kind<Offload> place(const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, Offload>> members;
  for (const auto& name : names) {
    members.emplace_back(name, name == "none"   ? Offload::none
                               : name == "host" ? Offload::host
                                                : Offload::file);
  }
  return enumeration<Offload>(std::move(members));
}

ParamGroup read_group(const Json& value, const std::string& path) {
  ParamGroup group;
  for (const auto& [name, inner] : value.items()) {
    const Key<ParamGroup>* found = nullptr;
    std::vector<std::string> known;
    for (const auto& candidate : group_keys()) {
      known.push_back(path + "." + candidate.path);
      if (candidate.path == name) found = &candidate;
    }
    if (found == nullptr) fail_unknown(path + "." + name, known);
    found->read(group, inner, path + "." + name);
  }
  if (group.match.empty())
    fail("config", path, " has no match; give the names it is for, for example \"*.bias\"");
  return group;
}

Kind<std::vector<ParamGroup>> groups() {
  Kind<std::vector<ParamGroup>> kind;
  kind.type = "list of groups";
  kind.allowed = "objects with the keys match, lr_multiplier and weight_decay";
  kind.decode = [](const Json& value, const std::string& path, std::vector<ParamGroup>& out) {
    if (!value.is_array()) return false;
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (!value[i].is_object()) return false;
      out.push_back(read_group(value[i], path + "[" + std::to_string(i) + "]"));
    }
    return true;
  };
  kind.encode = [](const std::vector<ParamGroup>& list) {
    Json out = Json::array();
    for (const auto& group : list) {
      Json entry = Json::object();
      for (const auto& field : group_keys()) entry[field.path] = field.write(group);
      out.push_back(std::move(entry));
    }
    return out;
  };
  return kind;
}

std::vector<Key<Config>> make_keys() {
  return {
      key(POISE_FIELD(batch.micro_batch_size), integer(0, kLargestCount),
          "samples of one forward and backward; 0: found by the planner where global_batch_size "
          "and "
          "memory.budget_bytes are given and accumulation is not, else 1"),
      key(POISE_FIELD(batch.accumulation), integer(0, kLargestCount),
          "micro-batches of one update on a rank; 0: what global_batch_size asks for, else 1"),
      key(POISE_FIELD(batch.global_batch_size), integer(0),
          "samples of one update over all ranks; 0: micro_batch_size x accumulation x ranks"),
      key(POISE_FIELD(batch.ramp_from), integer(0, kLargestCount),
          "micro-batches of the first update on a rank; 0: as many as of all others"),
      key(POISE_FIELD(batch.ramp_updates), integer(0, kLargestCount),
          "applied updates over which they grow, evenly, to the full number"),

      key(POISE_FIELD(precision.dtype), dtype(), "type of the forward"),
      key(POISE_FIELD(precision.parameters), dtype(),
          "type the parameters are kept in: fp32 or that of the forward; 16-bit ones get fp32 "
          "masters"),
      key(POISE_FIELD(precision.autocast), flag(), "torch autocast around a 16-bit forward"),
      key(POISE_FIELD(precision.fp32_accumulation), flag(),
          "gradients are summed in fp32; false: in the type of the parameters"),
      key(POISE_FIELD(precision.loss_scale), number(), "fp16: a fixed loss scale; 0: dynamic"),
      key(POISE_FIELD(precision.initial_loss_scale), number({.low = 0, .ends = Ends::open_low}),
          "fp16, dynamic: the first scale"),
      key(POISE_FIELD(precision.loss_scale_growth), number({.low = 1, .ends = Ends::open_low}),
          "fp16, dynamic: factor after enough clean updates"),
      key(POISE_FIELD(precision.loss_scale_backoff),
          number({.low = 0, .high = 1, .ends = Ends::open}),
          "fp16, dynamic: factor after overflow"),
      key(POISE_FIELD(precision.loss_scale_growth_interval), integer(1),
          "fp16, dynamic: clean updates before it grows"),
      key(POISE_FIELD(precision.loss_scale_hysteresis), integer(1),
          "fp16, dynamic: overflows in a row before it shrinks"),
      key(POISE_FIELD(precision.min_loss_scale), number({.low = 0, .ends = Ends::open_low}),
          "fp16, dynamic: floor"),
      key(POISE_FIELD(precision.max_loss_scale), number({.low = 0, .ends = Ends::open_low}),
          "fp16, dynamic: ceiling"),

      key(POISE_FIELD(optimizer.type),
          choice({"adamw", "adam", "adafactor", "lamb", "lars", "lion", "sgd"}), "the optimizer"),
      key(POISE_FIELD(optimizer.lr), number(), "peak learning rate"),
      key(POISE_FIELD(optimizer.lr_scaling), choice({"none", "linear", "sqrt"}),
          "the rate is times the samples of an update over lr_batch_size, or the root of that"),
      key(POISE_FIELD(optimizer.lr_batch_size), integer(0),
          "lr_scaling: samples of an update, of all ranks, that lr is right for"),
      key(POISE_FIELD(optimizer.beta1), number({.low = 0, .high = 1, .ends = Ends::open_high}),
          "adam, adamw, lamb: decay of the first moment; lion: of the blend whose sign is the "
          "step"),
      key(POISE_FIELD(optimizer.beta2), number({.low = 0, .high = 1, .ends = Ends::open_high}),
          "adam, adamw, lamb: decay of the second moment; lion: of its momentum (the paper's is "
          "0.99)"),
      key(POISE_FIELD(optimizer.eps), number({.low = 0, .ends = Ends::open_low}),
          "adam, adamw, lamb: added to the root of the second moment"),
      key(POISE_FIELD(optimizer.weight_decay), number(),
          "adamw, adafactor, lamb, lion: decoupled; adam, lars, sgd: added to the gradient"),
      key(POISE_FIELD(optimizer.moments), choice({"fp32", "bf16", "8bit"}),
          "adam, adamw, and lion but for bf16: what moments are kept in; bf16: rounded "
          "stochastically; 8bit: by blocks of 256 elements with one scale each"),
      key(POISE_FIELD(optimizer.momentum), number({.low = 0, .high = 1, .ends = Ends::open_high}),
          "sgd, lars: momentum"),
      key(POISE_FIELD(optimizer.nesterov), flag(), "sgd: Nesterov's momentum"),
      key(POISE_FIELD(optimizer.clip_threshold), number({.low = 0, .ends = Ends::open_low}),
          "adafactor: largest root mean square of a parameter's step, over the rate"),
      key(POISE_FIELD(optimizer.decay_rate),
          number({.low = -1, .high = 0, .ends = Ends::open_high}),
          "adafactor: the second moments forget by the number of updates to this"),
      key(POISE_FIELD(optimizer.eps_square), number({.low = 0, .ends = Ends::open_low}),
          "adafactor: added to squares of gradients"),
      key(POISE_FIELD(optimizer.scale_parameter), flag(),
          "adafactor: the rate is times the root mean square of the parameter"),
      key(POISE_FIELD(optimizer.eps_scale), number({.low = 0, .ends = Ends::open_low}),
          "adafactor: smallest such root mean square"),
      key(POISE_FIELD(optimizer.trust_coefficient), number({.low = 0, .ends = Ends::open_low}),
          "lars: a matrix's rate over the norm of its weights by that of its gradient"),
      key(POISE_FIELD(optimizer.min_trust), number(),
          "lamb: smallest ratio of the norms of weights and step"),
      key(POISE_FIELD(optimizer.max_trust), number(), "lamb: largest one; 0: no limit"),
      key(POISE_FIELD(optimizer.decay_rule), choice({"matrices", "all"}),
          "what weight decay is for; matrices: tensors of 2 or more dimensions, so no biases and "
          "norms"),
      key(POISE_FIELD(optimizer.max_grad_norm), number(),
          "largest global L2 norm of the gradient; 0: no clipping"),
      key(POISE_FIELD(optimizer.groups), groups(),
          "settings for parameters by name; the first match wins"),

      key(POISE_FIELD(schedule.type),
          choice({"constant", "linear", "cosine", "cosine_with_min_lr", "inverse_sqrt",
                  "warmup_stable_decay", "polynomial"}),
          "how the learning rate goes, by applied updates"),
      key(POISE_FIELD(schedule.warmup_updates), integer(0),
          "updates over which it rises to the peak"),
      key(POISE_FIELD(schedule.total_updates), integer(0),
          "updates after which it has ended; 0: train.max_updates"),
      key(POISE_FIELD(schedule.decay_updates), integer(0),
          "warmup_stable_decay: updates of the last leg"),
      key(POISE_FIELD(schedule.min_lr_ratio), number({.low = 0, .high = 1}),
          "lowest learning rate over the peak"),
      key(POISE_FIELD(schedule.power), number({.low = 0, .ends = Ends::open_low}),
          "polynomial: the power"),

      key(POISE_FIELD(checkpointing.policy),
          choice({"none", "every_n", "sqrt", "first_m", "list", "selective"}),
          "which units are recomputed in backward instead of kept"),
      key(POISE_FIELD(checkpointing.n), integer(1),
          "every_n: every n-th unit; first_m: the first n units"),
      key(POISE_FIELD(checkpointing.units), texts(), "list: names of units (* and ? allowed)"),

      key(POISE_FIELD(memory.budget_bytes), byte_count(), "the run may not hold more; 0: no limit"),
      key(POISE_FIELD(memory.on_misfit),
          enumeration<OnMisfit>({{"refuse", OnMisfit::refuse}, {"warn", OnMisfit::warn}}),
          "where the planner finds nothing that fits: do not begin, or begin with what needs "
          "least"),

      key(POISE_FIELD(zero.stage), integer(0, 3),
          "what is sharded over ranks; 0: nothing, 1: optimizer states, 2: gradients too, 3: "
          "parameters too"),
      key(POISE_FIELD(zero.reduce),
          enumeration<Reduce>(
              {{"auto", Reduce::automatic}, {"last", Reduce::last}, {"every", Reduce::every}}),
          "when gradients are joined over ranks: once per window (whole gradients are kept for "
          "it), or in every micro-batch; auto: "
          "last at stages 0 and 1, every at stages 2 and 3"),
      key(POISE_FIELD(zero.overlap), flag(), "gradients travel while backward goes on"),
      key(POISE_FIELD(zero.persistence_threshold), integer(0),
          "stage 3: parameters of fewer elements stay whole; 0: none"),
      key(POISE_FIELD(zero.shard_group_size), integer(0, kLargestCount),
          "ranks that shard among themselves, those of a node as a rule; groups of so many are "
          "replicas of each other; 0: all ranks are one group"),
      key(POISE_FIELD(zero.gradient_dtype),
          enumeration<DType>({{"fp32", DType::fp32}, {"bf16", DType::bf16}}),
          "type of gradients on their way between ranks; summed in fp32 on the CPU, in the type by "
          "NCCL"),
      key(POISE_FIELD(zero.keep_gathered),
          enumeration<KeepGathered>({{"no", KeepGathered::no}, {"window", KeepGathered::window}}),
          "stage 3: parameters are whole while their unit needs them, or once gathered until the "
          "end of the window"),

      key(POISE_FIELD(offload.optimizer), place({"none", "host", "file"}),
          "where masters and moments live; none: on the device"),
      key(POISE_FIELD(offload.optimizer_fraction),
          number({.low = 0, .high = 1, .ends = Ends::open_low}),
          "of masters and moments that leave the device, by whole units"),
      key(POISE_FIELD(offload.gradients), place({"none", "host", "file"}),
          "where gradients are summed, as they are made or joined; file: three units' sums at a "
          "time are on the host, the next one on its way in and the last one out"),
      key(POISE_FIELD(offload.parameters), place({"none", "host", "file"}),
          "where parameters live while their unit does not need them: at zero.stage 3, or on one "
          "rank"),
      key(POISE_FIELD(offload.activations), place({"none", "host", "file"}),
          "where tensors wait that forward saves for backward"),
      key(POISE_FIELD(offload.activation_units), texts(),
          "names of units (* and ? allowed) whose saved tensors leave; empty: all that forward "
          "saves"),
      key(POISE_FIELD(offload.activation_min_bytes), byte_count(),
          "of a saved tensor that leaves the device"),
      key(POISE_FIELD(offload.directory), text(),
          "folder of files, on a fast disk of this machine; ranks may differ in it"),
      key(POISE_FIELD(offload.io),
          enumeration<OffloadIo>({{"auto", OffloadIo::automatic},
                                  {"io_uring", OffloadIo::io_uring},
                                  {"threads", OffloadIo::threads}}),
          "how files are read and written; auto: io_uring where the system has it"),
      key(POISE_FIELD(offload.queue_depth), integer(1, 4096), "blocks in flight, each way"),
      key(POISE_FIELD(offload.block_bytes), byte_count(),
          "of one read or write; a multiple of 4096"),
      key(POISE_FIELD(offload.staging_bytes), byte_count(),
          "host memory for what an update has on its way; at least 16 x block_bytes"),
      key(POISE_FIELD(offload.pinned_budget_bytes), byte_count(),
          "with a GPU: host memory that is pinned; what is above is pageable"),

      // Above it a clock of nanoseconds runs over, and waits would end at once.
      key(POISE_FIELD(comm.timeout_seconds),
          number({.low = 0, .high = 1e9, .ends = Ends::open_low}),
          "a wait for other ranks ends after this with an error"),

      key(POISE_FIELD(engine.loss_weighting),
          enumeration<LossWeighting>({{"tokens", LossWeighting::tokens},
                                      {"micro_batch_mean", LossWeighting::micro_batch_mean}}),
          "a mean loss weighs as many tokens as it counted, or every micro-batch the same"),
      key(POISE_FIELD(engine.on_nonfinite),
          enumeration<NonFinite>({{"skip", NonFinite::skip}, {"stop", NonFinite::stop}}),
          "what a non-finite loss (or gradient, outside fp16) does to the run"),
      key(POISE_FIELD(engine.seed), unsigned_integer(),
          "of the parameters, the order of data, dropout"),
      key(POISE_FIELD(engine.noise_scale), flag(),
          "measure the gradient noise scale, where a window has two micro-batches or more; one "
          "more "
          "pass over the gradients' sums"),

      key(POISE_FIELD(model.builtin), filled_text(), "model of `poise train`: byte_gpt"),
      key(POISE_FIELD(model.layers), integer(1, 4096), "blocks"),
      key(POISE_FIELD(model.width), integer(1, 1 << 20), "features; a multiple of heads"),
      key(POISE_FIELD(model.heads), integer(1, 1 << 16), "attention heads"),
      key(POISE_FIELD(model.sequence_length), integer(1, 1 << 24), "bytes of one sample"),
      key(POISE_FIELD(model.dropout), number({.low = 0, .high = 1, .ends = Ends::open_high}),
          "share of activations set to zero"),
      key(POISE_FIELD(model.loss_chunk_tokens), integer(0),
          "tokens whose logits exist at once; 0: all of them"),

      key(POISE_FIELD(data.train), texts(), "files or folders, read as bytes"),
      key(POISE_FIELD(data.validation), texts(),
          "the same for validation; empty: the tail of train"),
      key(POISE_FIELD(data.suffix), text(), "of the files taken from folders, for example \".py\""),
      key(POISE_FIELD(data.validation_fraction),
          number({.low = 0, .high = 1, .ends = Ends::open_high}),
          "the tail of train that is kept for validation; 0: no validation"),
      key(POISE_FIELD(data.shuffle), flag(), "samples in a random order that the seed decides"),
      key(POISE_FIELD(data.prefetch), integer(0, 1024), "windows read ahead"),

      key(POISE_FIELD(train.output_dir), filled_text(), "folder of everything that is written"),
      key(POISE_FIELD(train.max_updates), integer(1), "updates of the run"),
      key(POISE_FIELD(train.log_every), integer(1), "updates between two lines of the log"),
      key(POISE_FIELD(train.validate_every), integer(0),
          "updates between two validations; 0: at the end only"),
      key(POISE_FIELD(train.validation_batches), integer(0),
          "micro-batches of one validation; 0: no validation"),
      key(POISE_FIELD(train.sample_bytes), integer(0), "bytes of text generated at the end"),
      key(POISE_FIELD(train.profile_updates), integers(1),
          "[first, last]: a trace of these updates is written; empty: none"),

      key(POISE_FIELD(state.save_every), integer(0),
          "updates between two saves, into output_dir/state, and one at the end; 0: none"),
      key(POISE_FIELD(state.save_total_limit), integer(0),
          "saves that stay, the newest ones; 0: all"),
      key(POISE_FIELD(state.keep_every), integer(0),
          "saves after each n-th update stay besides; 0: none of them"),
      key(POISE_FIELD(state.keep_best), flag(),
          "a save is made after each validation with the lowest loss so far; it stays besides, and "
          "output_dir/state/best leads to it"),
      key(POISE_FIELD(state.rehearse), flag(),
          "where saves are made, one is tried out before the first update and removed: a full disk "
          "is told then"),
      key(POISE_FIELD(state.resume), filled_text(),
          "none; auto: from the latest save of output_dir, where there is one; else the path of a "
          "save"),
      key(POISE_FIELD(state.asynchronous), flag(), "saves are written while the training goes on"),
      key(POISE_FIELD(state.staging_bytes), byte_count(),
          "host memory that an asynchronous save may hold; a larger one waits for the disk"),
  };
}

}  // namespace

const std::vector<Section>& sections() {
  static const std::vector<Section> all = {
      {"batch", "How many samples an update takes and in which pieces."},
      {"precision", "Types of numbers, and the loss scale of fp16."},
      {"optimizer", "The optimizer, clipping, and settings for some parameters."},
      {"schedule", "The learning rate over the run; it counts applied updates."},
      {"checkpointing", "Less memory between forward and backward for a second forward."},
      {"memory", "The budget."},
      {"zero", "Sharding over ranks (ZeRO). With one rank nothing is sharded."},
      {"offload", "What lives away from the device: in memory of the host, or in files."},
      {"comm", "The group of ranks; which ranks there are comes from the launcher."},
      {"engine", "How losses are joined, what bad numbers do, the seed."},
      {"model",
       "The model that `poise train` builds. In the Python package `\"import\": "
       "\"module:function\"` instead of\n`builtin` takes it from that function, which gets the "
       "other keys ([first run](first_run.md))."},
      {"data", "What `poise train` reads."},
      {"train", "Length, log and output of `poise train`."},
      {"state", "Saving and resuming ([state_format.md](state_format.md))."},
  };
  return all;
}

const std::vector<Key<Config>>& keys() {
  static const auto all = make_keys();
  return all;
}

const std::vector<Key<ParamGroup>>& group_keys() {
  static const std::vector<Key<ParamGroup>> all = {
      row<ParamGroup>(POISE_FIELD(match), filled_text(), "names of parameters (* and ? allowed)"),
      row<ParamGroup>(POISE_FIELD(lr_multiplier), number(), "times the learning rate"),
      row<ParamGroup>(POISE_FIELD(weight_decay), number_or(-1, "that of the optimizer", {}),
                      "instead of the optimizer's"),
  };
  return all;
}

}  // namespace poise::config
