// Rules between settings, one function per section. Values by themselves are the schema's business.
#include <algorithm>

#include "config/schema.h"
#include "poise/error.h"

namespace poise {
namespace config {
namespace {

const char* name(DType dtype) {
  return dtype == DType::fp32 ? "fp32" : dtype == DType::bf16 ? "bf16" : "fp16";
}

// A setting that would be ignored is an error: it says something else than the run would do.
void only_for(bool used, bool given, const char* key, const char* where) {
  if (given && !used) fail("config", key, " is given but is only for ", where, "; remove it");
}

void check_batch(const BatchPolicy& batch) {
  if ((batch.ramp_from > 0) != (batch.ramp_updates > 0)) {
    fail("config", "batch.ramp_from is ", batch.ramp_from, " and batch.ramp_updates ",
         batch.ramp_updates, "; a ramp needs both, where it begins and how many updates it has");
  }
  if (batch.global_batch_size == 0) return;
  // Ranks are not known here: they may take up what is left, so it must be whole.
  const auto per_rank = micro_batch_size(batch) * std::max<std::int64_t>(batch.accumulation, 1);
  if (batch.global_batch_size % per_rank != 0) {
    fail("config", "batch.global_batch_size is ", batch.global_batch_size,
         ", which is no multiple of ",
         batch.accumulation == 0 ? "batch.micro_batch_size "
                                 : "batch.micro_batch_size x batch.accumulation ",
         per_rank, "; change one of them");
  }
}

void check_precision(const PrecisionPolicy& precision) {
  const PrecisionPolicy defaults;
  if (precision.parameters != DType::fp32 && precision.parameters != precision.dtype) {
    fail("config", "precision.parameters is ", name(precision.parameters),
         " and precision.dtype is ", name(precision.dtype),
         "; parameters are fp32 or of the same type");
  }
  if (precision.dtype != DType::fp32 && precision.parameters == DType::fp32 &&
      !precision.autocast) {
    fail("config", "precision.dtype is ", name(precision.dtype),
         " with fp32 parameters and no autocast, so nothing would run in it; set "
         "precision.autocast or "
         "precision.parameters");
  }
  const bool fp16 = precision.dtype == DType::fp16;
  only_for(fp16, precision.loss_scale != 0, "precision.loss_scale", "precision.dtype fp16");
  if (fp16 && precision.loss_scale == 0 &&
      !(precision.min_loss_scale <= precision.initial_loss_scale &&
        precision.initial_loss_scale <= precision.max_loss_scale)) {
    fail("config", "precision.initial_loss_scale is ", precision.initial_loss_scale,
         "; it must lie between min_loss_scale ", precision.min_loss_scale, " and max_loss_scale ",
         precision.max_loss_scale);
  }
}

void check_optimizer(const OptimizerPolicy& optimizer) {
  const bool sgd = optimizer.type == "sgd";
  const bool lamb = optimizer.type == "lamb", lars = optimizer.type == "lars";
  const OptimizerPolicy defaults;
  only_for(sgd || lars, optimizer.momentum != 0, "optimizer.momentum",
           "optimizer.type sgd and lars");
  only_for(lars, optimizer.trust_coefficient != defaults.trust_coefficient,
           "optimizer.trust_coefficient", "optimizer.type lars");
  only_for(lamb, optimizer.min_trust != 0, "optimizer.min_trust", "optimizer.type lamb");
  only_for(lamb, optimizer.max_trust != 0, "optimizer.max_trust", "optimizer.type lamb");
  const bool scales = optimizer.lr_scaling != "none";
  only_for(scales, optimizer.lr_batch_size != 0, "optimizer.lr_batch_size",
           "optimizer.lr_scaling linear and sqrt");
  if (scales && optimizer.lr_batch_size == 0) {
    fail("config", "optimizer.lr_scaling is ", optimizer.lr_scaling,
         ", and lr_batch_size is 0; say for how many samples of an update optimizer.lr is");
  }
  const bool adafactor = optimizer.type == "adafactor";
  const auto of_adafactor = [&](bool given, const char* key) {
    only_for(adafactor, given, key, "optimizer.type adafactor");
  };
  of_adafactor(optimizer.clip_threshold != defaults.clip_threshold, "optimizer.clip_threshold");
  of_adafactor(optimizer.decay_rate != defaults.decay_rate, "optimizer.decay_rate");
  of_adafactor(optimizer.eps_square != defaults.eps_square, "optimizer.eps_square");
  of_adafactor(optimizer.scale_parameter, "optimizer.scale_parameter");
  of_adafactor(optimizer.eps_scale != defaults.eps_scale, "optimizer.eps_scale");
  if (optimizer.max_trust != 0 && optimizer.max_trust < optimizer.min_trust) {
    fail("config", "optimizer.max_trust is ", optimizer.max_trust, " and min_trust ",
         optimizer.min_trust, "; the first is 0 or the larger one");
  }
  only_for(sgd, optimizer.nesterov, "optimizer.nesterov", "optimizer.type sgd");
  const bool adam = optimizer.type == "adamw" || optimizer.type == "adam";
  only_for(adam || optimizer.type == "lion", optimizer.moments != "fp32", "optimizer.moments",
           "optimizer.type adamw, adam and lion");
  if (optimizer.type == "lion" && optimizer.moments == "bf16") {
    fail("config",
         "optimizer.moments is bf16 with optimizer.type lion, which has fp32 and 8bit; "
         "use one of them");
  }
  if (optimizer.nesterov && optimizer.momentum == 0) {
    fail("config", "optimizer.nesterov needs optimizer.momentum > 0; it is 0");
  }
}

void check_schedule(const SchedulePolicy& schedule, std::int64_t max_updates) {
  const auto total = schedule.total_updates == 0 ? max_updates : schedule.total_updates;
  const bool decays_late = schedule.type == "warmup_stable_decay";
  only_for(decays_late, schedule.decay_updates != 0, "schedule.decay_updates",
           "schedule.type warmup_stable_decay");
  only_for(schedule.type != "constant", schedule.min_lr_ratio != 0, "schedule.min_lr_ratio",
           "a schedule.type that falls");
  only_for(schedule.type == "polynomial", schedule.power != SchedulePolicy{}.power,
           "schedule.power", "schedule.type polynomial");
  if (decays_late && schedule.decay_updates == 0) {
    fail("config",
         "schedule.decay_updates is 0; schedule.type warmup_stable_decay needs the length of its "
         "last leg");
  }
  const bool has_end = schedule.type != "constant" && schedule.type != "inverse_sqrt";
  // Compared by subtraction: the sum of two large counts may not fit.
  if (schedule.warmup_updates > total - schedule.decay_updates &&
      (has_end || schedule.warmup_updates > total)) {
    fail("config", "schedule.warmup_updates ", schedule.warmup_updates, " and decay_updates ",
         schedule.decay_updates, " do not fit into ", total,
         " updates; shorten them or lengthen the run");
  }
}

void check_checkpointing(const CheckpointingPolicy& checkpointing) {
  const bool list = checkpointing.policy == "list";
  const bool counts = checkpointing.policy == "every_n" || checkpointing.policy == "first_m";
  only_for(list, !checkpointing.units.empty(), "checkpointing.units", "checkpointing.policy list");
  only_for(counts, checkpointing.n != 1, "checkpointing.n",
           "checkpointing.policy every_n or first_m");
  if (list && checkpointing.units.empty()) {
    fail("config", "checkpointing.units is empty; checkpointing.policy list needs names of units");
  }
}

void check_zero(const ZeroPolicy& zero, const PrecisionPolicy& precision) {
  if (zero.stage <= 1 && zero.reduce == Reduce::every) {
    fail("config", "zero.reduce is every at zero.stage ", zero.stage,
         ", which keeps whole gradients anyway; use stage 2, or reduce last");
  }
  if (zero.stage == 2 && zero.reduce == Reduce::last) {
    fail("config",
         "zero.reduce is last at zero.stage 2, which then would keep whole gradients for the "
         "window; use stage 1, or reduce every");
  }
  only_for(zero.stage == 3, zero.keep_gathered != KeepGathered::no, "zero.keep_gathered",
           "zero.stage 3");
  only_for(zero.stage == 3, zero.persistence_threshold != 0, "zero.persistence_threshold",
           "zero.stage 3");
  only_for(zero.stage >= 1, zero.shard_group_size != 0, "zero.shard_group_size",
           "zero.stage 1 to 3");
  if (zero.stage >= 1 && !precision.fp32_accumulation) {
    fail("config", "zero.stage ", zero.stage,
         " sums gradients in fp32; set precision.fp32_accumulation, or stage 0");
  }
}

// What such an optimizer needs of whole parameters is summed on the device.
void check_offload_of(const OptimizerPolicy& optimizer, const OffloadPolicy& offload) {
  const bool whole =
      optimizer.type == "adafactor" || optimizer.type == "lamb" || optimizer.type == "lars";
  const bool away = offload.optimizer != Offload::none || offload.gradients != Offload::none ||
                    offload.parameters != Offload::none;
  if (!whole || !away) return;
  fail("config", "optimizer.type ", optimizer.type,
       " needs sums over whole parameters before it updates any, so that its states, gradients and "
       "parameters stay on the device; leave offload.",
       offload.optimizer != Offload::none   ? "optimizer"
       : offload.gradients != Offload::none ? "gradients"
                                            : "parameters",
       " out, or use adamw, adam, lion or sgd");
}

void check_offload(const OffloadPolicy& offload) {
  const bool file = offload.optimizer == Offload::file || offload.parameters == Offload::file ||
                    offload.gradients == Offload::file || offload.activations == Offload::file;
  only_for(offload.optimizer != Offload::none, offload.optimizer_fraction != 1,
           "offload.optimizer_fraction", "offload.optimizer host or file");
  only_for(offload.activations != Offload::none, !offload.activation_units.empty(),
           "offload.activation_units", "offload.activations host or file");
  only_for(file, !offload.directory.empty(), "offload.directory", "what is offloaded to file");
  only_for(file, offload.io != OffloadIo::automatic, "offload.io", "what is offloaded to file");
  if (file && offload.directory.empty()) {
    fail("config",
         "offload.directory is empty, and something is offloaded to file; give a folder on a fast "
         "disk");
  }
  constexpr std::int64_t kSector = 4096, kLargest = std::int64_t{1} << 30;
  if (offload.block_bytes < kSector || offload.block_bytes > kLargest ||
      offload.block_bytes % kSector != 0) {
    fail("config", "offload.block_bytes is ", offload.block_bytes,
         "; allowed: multiples of 4096 up to 2^30");
  }
  if (offload.staging_bytes / 16 < offload.block_bytes) {
    fail("config", "offload.staging_bytes is ", offload.staging_bytes,
         "; an update needs 16 blocks of offload.block_bytes ", offload.block_bytes);
  }
}

void check_model(const ModelPolicy& model) {
  if (model.width % model.heads != 0) {
    fail("config", "model.width ", model.width, " is no multiple of model.heads ", model.heads,
         "; change one of them");
  }
}

void check_train(const TrainPolicy& train) {
  const auto& updates = train.profile_updates;
  if (updates.empty()) return;
  if (updates.size() != 2 || updates[0] > updates[1] || updates[1] > train.max_updates) {
    fail("config", "train.profile_updates is ", shown(Json(updates)),
         "; allowed: [first, last] with first <= last <= train.max_updates ", train.max_updates);
  }
}

void check_state(const StatePolicy& state) {
  only_for(state.save_every > 0, state.save_total_limit != 0, "state.save_total_limit",
           "state.save_every above 0");
  only_for(state.save_total_limit > 0, state.keep_every != 0, "state.keep_every",
           "state.save_total_limit above 0");
  only_for(state.save_every > 0, state.keep_best, "state.keep_best", "state.save_every above 0");
  only_for(state.asynchronous, state.staging_bytes != StatePolicy{}.staging_bytes,
           "state.staging_bytes", "state.asynchronous");
}

}  // namespace

bool reduces_every_micro_batch(const ZeroPolicy& zero) {
  return zero.reduce == Reduce::every || (zero.reduce == Reduce::automatic && zero.stage >= 2);
}

std::int64_t micro_batch_size(const BatchPolicy& batch) {
  return std::max<std::int64_t>(batch.micro_batch_size, 1);
}

std::int64_t accumulation_at(const BatchPolicy& batch, std::int64_t ranks, std::int64_t applied) {
  const auto full = accumulation(batch, ranks);
  if (applied >= batch.ramp_updates) return full;
  if (batch.ramp_from > full) {
    fail("config", "batch.ramp_from is ", batch.ramp_from, ", more than the ", full,
         " micro-batches of a full update; make it smaller");
  }
  return batch.ramp_from + (full - batch.ramp_from) * applied / batch.ramp_updates;
}

std::int64_t accumulation(const BatchPolicy& batch, std::int64_t ranks) {
  if (batch.global_batch_size == 0) return std::max<std::int64_t>(batch.accumulation, 1);
  const auto samples = micro_batch_size(batch) * ranks;
  const auto derived = batch.global_batch_size / samples;
  if (derived * samples != batch.global_batch_size ||
      (batch.accumulation != 0 && batch.accumulation != derived)) {
    fail("config", "batch.global_batch_size ", batch.global_batch_size, " is not micro_batch_size ",
         micro_batch_size(batch), " x accumulation ",
         batch.accumulation == 0 ? std::string("(any)") : std::to_string(batch.accumulation),
         " x ranks ", ranks, "; change one of them");
  }
  return derived;
}

}  // namespace config

bool Config::balance_is_open() const {
  return batch.micro_batch_size == 0 && batch.accumulation == 0 && batch.global_batch_size > 0 &&
         memory.budget_bytes > 0;
}

void Config::validate() const {
  // Written and read back, so that a Config filled by hand meets the schema's limits too.
  Config copy;
  for (const auto& key : config::keys()) key.read(copy, key.write(*this), key.path);
  config::check_batch(batch);
  config::check_precision(precision);
  config::check_optimizer(optimizer);
  config::check_schedule(schedule, train.max_updates);
  config::check_checkpointing(checkpointing);
  config::check_zero(zero, precision);
  config::check_offload(offload);
  config::check_offload_of(optimizer, offload);
  config::check_model(model);
  config::check_train(train);
  config::check_state(state);
}

}  // namespace poise
