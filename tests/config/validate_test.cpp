// Settings that contradict each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "poise/config.h"
#include "poise/error.h"

namespace poise {
namespace {

using ::testing::HasSubstr;

struct Case {
  std::function<void(Config&)> change;
  const char* message;  // a part of it; "": accepted
};

std::string message_of(const std::function<void(Config&)>& change) {
  Config config;
  change(config);
  try {
    config.validate();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Validate, RulesBetweenSettings) {
  using config::DType;
  const Case cases[] = {
      {[](Config&) {}, ""},
      {[](Config& c) {
         c.batch = {3, 0, 8};
       },
       "no multiple of batch.micro_batch_size 3"},
      {[](Config& c) {
         c.batch = {2, 3, 8};
       },
       "batch.micro_batch_size x batch.accumulation 6"},
      {[](Config& c) {
         c.batch = {2, 4, 8};
       },
       ""},
      {[](Config& c) {
         c.batch = {2, 1, 8};
       },
       ""},  // with four ranks
      {[](Config& c) { c.precision.parameters = DType::bf16; },
       "precision.parameters is bf16 and precision.dtype is fp32"},
      {[](Config& c) { c.precision.dtype = c.precision.parameters = DType::bf16; }, ""},
      {[](Config& c) {
         c.precision.dtype = DType::bf16;
         c.precision.parameters = DType::fp16;
       },
       "parameters are fp32 or of the same type"},
      {[](Config& c) {
         c.precision.dtype = DType::bf16;
         c.precision.autocast = false;
       },
       "nothing would run in it"},
      {[](Config& c) {
         c.precision.dtype = c.precision.parameters = DType::fp16;
         c.precision.autocast = false;
       },
       ""},
      {[](Config& c) { c.precision.loss_scale = 8; },
       "precision.loss_scale is given but is only for precision.dtype fp16"},
      {[](Config& c) {
         c.precision.dtype = DType::fp16;
         c.precision.loss_scale = 8;
       },
       ""},
      {[](Config& c) {
         c.precision.dtype = DType::fp16;
         c.precision.min_loss_scale = 1e6;
       },
       "must lie between"},
      {[](Config& c) { c.optimizer.momentum = 0.9; },
       "optimizer.momentum is given but is only for"},
      {[](Config& c) { c.optimizer.trust_coefficient = 0.1; },
       "optimizer.trust_coefficient is given but is only for optimizer.type lars"},
      {[](Config& c) { c.optimizer.max_trust = 10; }, "only for optimizer.type lamb"},
      {[](Config& c) {
         c.optimizer.type = "lamb";
         c.optimizer.min_trust = 2;
         c.optimizer.max_trust = 1;
       },
       "optimizer.max_trust is 1 and min_trust 2"},
      {[](Config& c) {
         c.optimizer.type = "lamb";
         c.optimizer.min_trust = 2;
       },
       ""},
      {[](Config& c) { c.optimizer.scale_parameter = true; }, "only for optimizer.type adafactor"},
      {[](Config& c) {
         c.optimizer.type = "sgd";
         c.optimizer.moments = "bf16";
       },
       "optimizer.moments is given but is only for optimizer.type adamw, adam and lion"},
      {[](Config& c) {
         c.optimizer.type = "lion";
         c.optimizer.moments = "bf16";
       },
       "optimizer.moments is bf16 with optimizer.type lion"},
      {[](Config& c) {
         c.optimizer.type = "lion";
         c.optimizer.moments = "8bit";
       },
       ""},
      {[](Config& c) { c.zero.shard_group_size = 2; },
       "zero.shard_group_size is given but is only for zero.stage 1 to 3"},
      {[](Config& c) {
         c.zero.stage = 1;
         c.zero.shard_group_size = 2;
       },
       ""},
      {[](Config& c) {
         c.optimizer.type = "adafactor";
         c.offload.parameters = config::Offload::host;
       },
       "leave offload.parameters out, or use adamw, adam, lion or sgd"},
      {[](Config& c) { c.optimizer.lr_scaling = "sqrt"; }, "say for how many samples"},
      {[](Config& c) { c.optimizer.lr_batch_size = 8; }, "only for optimizer.lr_scaling"},
      {[](Config& c) { c.batch.ramp_from = 2; }, "a ramp needs both"},
      {[](Config& c) {
         c.optimizer.type = "sgd";
         c.optimizer.nesterov = true;
       },
       "needs optimizer.momentum > 0"},
      {[](Config& c) { c.schedule.warmup_updates = 101; }, "do not fit into 100 updates"},
      {[](Config& c) {
         c.schedule.warmup_updates = 100;
         c.schedule.type = "cosine";
       },
       ""},
      {[](Config& c) {
         c.schedule.total_updates = 50;
         c.schedule.warmup_updates = 51;
         c.schedule.type = "linear";
       },
       "do not fit into 50"},
      {[](Config& c) { c.schedule.type = "warmup_stable_decay"; },
       "needs the length of its last leg"},
      {[](Config& c) {
         c.schedule.type = "warmup_stable_decay";
         c.schedule.decay_updates = 60;
         c.schedule.warmup_updates = 41;
       },
       "do not fit"},
      {[](Config& c) {
         c.schedule.type = "warmup_stable_decay";
         c.schedule.decay_updates = 60;
         c.schedule.warmup_updates = 40;
       },
       ""},
      {[](Config& c) {
         c.schedule.type = "warmup_stable_decay";
         c.schedule.decay_updates = INT64_MAX;
         c.schedule.warmup_updates = INT64_MAX;
       },
       "do not fit"},
      {[](Config& c) {
         c.schedule.type = "linear";
         c.schedule.decay_updates = 6;
       },
       "only for schedule.type warmup_stable_decay"},
      {[](Config& c) { c.schedule.min_lr_ratio = 0.1; }, "schedule.min_lr_ratio is given"},
      {[](Config& c) { c.schedule.power = 2; }, "only for schedule.type polynomial"},
      {[](Config& c) { c.checkpointing.policy = "list"; }, "needs names of units"},
      {[](Config& c) { c.checkpointing.units = {"a"}; }, "only for checkpointing.policy list"},
      {[](Config& c) { c.checkpointing.n = 2; },
       "only for checkpointing.policy every_n or first_m"},
      {[](Config& c) { c.model.heads = 3; }, "no multiple of model.heads 3"},
      {[](Config& c) { c.train.profile_updates = {5}; }, "[first, last]"},
      {[](Config& c) {
         c.train.profile_updates = {5, 4};
       },
       "[first, last]"},
      {[](Config& c) {
         c.train.profile_updates = {5, 101};
       },
       "max_updates 100"},
  };
  int i = 0;
  for (const auto& c : cases) {
    EXPECT_THAT(message_of(c.change), HasSubstr(*c.message ? c.message : "accepted"))
        << "case " << i;
    ++i;
  }
}

TEST(Validate, ConfigsFilledByHandMeetTheLimits) {
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(message_of([&](Config& c) { c.optimizer.lr = bad; }),
                HasSubstr("optimizer.lr is "));
    EXPECT_THAT(message_of([&](Config& c) {
                  c.optimizer.groups = {{"a", bad, 0}};
                }),
                HasSubstr("groups[0].lr_multiplier is "));
  }
  EXPECT_THAT(message_of([](Config& c) { c.optimizer.lr = std::nan(""); }),
              HasSubstr("optimizer.lr is nan"));
  EXPECT_THAT(message_of([](Config& c) { c.optimizer.type = "lyon"; }),
              HasSubstr("optimizer.type is \"lyon\""));
  EXPECT_THAT(message_of([](Config& c) { c.precision.dtype = static_cast<config::DType>(9); }),
              HasSubstr("precision.dtype is"));
  EXPECT_THAT(message_of([](Config& c) { c.memory.budget_bytes = -1; }),
              HasSubstr("memory.budget_bytes is -1"));
  EXPECT_THAT(message_of([](Config& c) { c.data.train = {std::string("\xff\xfe")}; }),
              HasSubstr("accepted"));
}

TEST(Accumulation, GrowsAlongARamp) {
  config::BatchPolicy batch;
  batch.accumulation = 10;
  EXPECT_EQ(config::accumulation_at(batch, 1, 0), 10);
  batch.ramp_from = 2;
  batch.ramp_updates = 4;
  const std::int64_t want[] = {2, 4, 6, 8, 10, 10};
  for (std::int64_t applied = 0; applied < 6; ++applied) {
    EXPECT_EQ(config::accumulation_at(batch, 3, applied), want[applied]) << applied;
  }
  batch.ramp_updates = 3;
  EXPECT_EQ(config::accumulation_at(batch, 1, 1), 4);  // 2 + 8 / 3, in whole micro-batches
  batch.accumulation = 0;
  batch.global_batch_size = 24;
  EXPECT_EQ(config::accumulation_at(batch, 4, 3), 6);
  batch.ramp_from = 7;
  EXPECT_THROW(config::accumulation_at(batch, 4, 0), Error);
}

TEST(Accumulation, IsGlobalOverMicroAndRanks) {
  using config::accumulation;
  EXPECT_EQ(accumulation({4, 0, 0}), 1);
  EXPECT_EQ(accumulation({4, 5, 0}, 3), 5);
  EXPECT_EQ(accumulation({2, 0, 24}), 12);
  EXPECT_EQ(accumulation({2, 0, 24}, 3), 4);
  EXPECT_EQ(accumulation({2, 4, 24}, 3), 4);
  EXPECT_THROW(accumulation({2, 1, 24}), Error);
  EXPECT_THROW(accumulation({2, 4, 24}, 2), Error);
  EXPECT_THROW(accumulation({2, 0, 24}, 5), Error);
  EXPECT_THROW(accumulation({4, 0, 2}), Error);
}

}  // namespace
}  // namespace poise
