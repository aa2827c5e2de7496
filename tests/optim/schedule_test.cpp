// Learning rates by update count: hand-made tables, transformers' formulas, ends and joints.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {
namespace {

config::SchedulePolicy policy(const char* type, std::int64_t warmup, std::int64_t total) {
  config::SchedulePolicy result;
  result.type = type;
  result.warmup_updates = warmup;
  result.total_updates = total;
  return result;
}

void expect_table(const config::SchedulePolicy& p, const std::vector<double>& table) {
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_NEAR(schedule_multiplier(p, static_cast<std::int64_t>(i)), table[i], 1e-15)
        << p.type << " at " << i;
  }
}

TEST(Schedule, HandMadeTables) {
  const double r2 = std::sqrt(2.0);
  expect_table(policy("constant", 0, 4), {1, 1, 1, 1, 1, 1});
  expect_table(policy("constant", 4, 8), {0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1});
  expect_table(policy("linear", 2, 6), {0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0});
  expect_table(policy("linear", 0, 4), {1, 0.75, 0.5, 0.25, 0});
  // Half a cosine over 4 updates: cos of 0, 45, 90, 135 and 180 degrees.
  expect_table(policy("cosine", 2, 6), {0, 0.5, 1, (2 + r2) / 4, 0.5, (2 - r2) / 4, 0, 0});
  auto floored = policy("cosine_with_min_lr", 2, 6);
  floored.min_lr_ratio = 0.2;
  expect_table(floored,
               {0, 0.5, 1, 0.2 + 0.8 * (2 + r2) / 4, 0.6, 0.2 + 0.8 * (2 - r2) / 4, 0.2, 0.2});
  expect_table(policy("inverse_sqrt", 4, 0),
               {0, 0.25, 0.5, 0.75, 1, std::sqrt(4.0 / 5.0), std::sqrt(4.0 / 6.0)});
  EXPECT_DOUBLE_EQ(schedule_multiplier(policy("inverse_sqrt", 4, 0), 16), 0.5);
  EXPECT_DOUBLE_EQ(schedule_multiplier(policy("inverse_sqrt", 0, 0), 0), 1.0);
  EXPECT_DOUBLE_EQ(schedule_multiplier(policy("inverse_sqrt", 0, 0), 30000),
                   0.5);  // timescale 10000
  auto square = policy("polynomial", 1, 5);
  square.power = 2;
  square.min_lr_ratio = 0.1;
  expect_table(square, {0, 1, 0.1 + 0.9 * 0.5625, 0.1 + 0.9 * 0.25, 0.1 + 0.9 * 0.0625, 0.1, 0.1});
  auto wsd = policy("warmup_stable_decay", 2, 8);
  wsd.decay_updates = 4;
  wsd.min_lr_ratio = 0.5;  // also where its warmup starts
  expect_table(wsd, {0.5, 0.75, 1, 1, 1, 0.5 + 0.5 * (2 + r2) / 4, 0.75, 0.5 + 0.5 * (2 - r2) / 4,
                     0.5, 0.5});
}

// The lambdas of transformers/optimization.py as they are written there.
double transformers_lambda(const config::SchedulePolicy& p, double step) {
  const double warmup = static_cast<double>(p.warmup_updates),
               total = static_cast<double>(p.total_updates);
  const double pi = std::acos(-1.0), cycles = 0.5, min_lr = p.min_lr_ratio;
  if (p.type == "warmup_stable_decay") {
    const double decay = static_cast<double>(p.decay_updates), stable = total - warmup - decay;
    if (step < warmup) return step / std::max(1.0, warmup) * (1 - min_lr) + min_lr;
    if (step < warmup + stable) return 1;
    if (step >= warmup + stable + decay) return min_lr;
    const double progress = (step - warmup - stable) / std::max(1.0, decay);
    return std::max(0.0, 0.5 * (1 + std::cos(pi * cycles * 2 * progress)) * (1 - min_lr) + min_lr);
  }
  if (step < warmup) return step / std::max(1.0, warmup);
  if (p.type == "constant") return 1;
  if (p.type == "linear") return std::max(0.0, (total - step) / std::max(1.0, total - warmup));
  if (p.type == "inverse_sqrt") return 1 / std::sqrt((step + (warmup - warmup)) / warmup);
  const double progress = (step - warmup) / std::max(1.0, total - warmup);
  if (p.type == "polynomial") {
    const double lr_init = 3e-4, lr_end = min_lr * lr_init;
    if (step > total) return lr_end / lr_init;
    return ((lr_init - lr_end) * std::pow(1 - (step - warmup) / (total - warmup), p.power) +
            lr_end) /
           lr_init;
  }
  const double factor = 0.5 * (1 + std::cos(pi * cycles * 2 * progress));
  return std::max(0.0, factor * (1 - min_lr) + min_lr);  // cosine: min_lr 0
}

TEST(Schedule, SameValuesAsTransformers) {
  for (const char* type : {"constant", "linear", "cosine", "cosine_with_min_lr", "inverse_sqrt",
                           "warmup_stable_decay", "polynomial"}) {
    for (const std::int64_t warmup : {1, 7, 100}) {
      auto p = policy(type, warmup, 1000);
      const std::string name = type;
      if (name == "cosine_with_min_lr" || name == "polynomial" || name == "warmup_stable_decay")
        p.min_lr_ratio = 0.1;
      if (name == "warmup_stable_decay") p.decay_updates = 300;
      if (name == "polynomial") p.power = 1.5;
      for (std::int64_t step = 0; step <= 1000; ++step) {
        ASSERT_NEAR(schedule_multiplier(p, step), transformers_lambda(p, static_cast<double>(step)),
                    1e-13)
            << type << " warmup " << warmup << " step " << step;
      }
    }
  }
}

TEST(Schedule, NeverJumpsNorLeavesItsRange) {
  for (const char* type : {"constant", "linear", "cosine", "cosine_with_min_lr", "inverse_sqrt",
                           "warmup_stable_decay", "polynomial"}) {
    auto p = policy(type, 50, 1000);
    p.min_lr_ratio = 0.1;
    if (p.type == "warmup_stable_decay") p.decay_updates = 200;
    double before = schedule_multiplier(p, 0);
    EXPECT_LE(before, 0.1);
    for (std::int64_t step = 1; step <= 3000; ++step) {
      const double now = schedule_multiplier(p, step);
      ASSERT_LE(std::abs(now - before), 1.0 / 50 + 1e-12) << type << " at " << step;
      ASSERT_LE(now, 1.0);
      if (step >= 50) {
        ASSERT_GE(now, 0.1) << type << " at " << step;
      }
      if (step > 50) {
        ASSERT_LE(now, before) << type << " rises at " << step;
      }
      before = now;
    }
    EXPECT_DOUBLE_EQ(schedule_multiplier(p, 50), 1.0) << type;  // the peak is reached exactly
  }
}

TEST(Schedule, EndsAtTheEnd) {
  for (const char* type : {"linear", "cosine", "polynomial"}) {
    EXPECT_NEAR(schedule_multiplier(policy(type, 0, 10), 10), 0, 1e-16) << type;
    EXPECT_GT(schedule_multiplier(policy(type, 0, 10), 9), 0) << type;
    // Nothing but warmup: one update at the end of it, no division by zero.
    EXPECT_DOUBLE_EQ(schedule_multiplier(policy(type, 10, 10), 10), 1.0) << type;
  }
}

TEST(BatchMultiplier, FollowsTheBatchOrItsRoot) {
  config::OptimizerPolicy policy;
  policy.lr_batch_size = 256;
  EXPECT_EQ(batch_multiplier(policy, 8192), 1);
  policy.lr_scaling = "linear";
  EXPECT_EQ(batch_multiplier(policy, 256), 1);
  EXPECT_EQ(batch_multiplier(policy, 8192), 32);
  EXPECT_EQ(batch_multiplier(policy, 64), 0.25);
  policy.lr_scaling = "sqrt";
  EXPECT_EQ(batch_multiplier(policy, 256), 1);
  EXPECT_EQ(batch_multiplier(policy, 4096), 4);
  EXPECT_DOUBLE_EQ(batch_multiplier(policy, 512), std::sqrt(2.0));
  EXPECT_THROW(batch_multiplier(policy, 0), Error);
  policy.lr_scaling = "cubic";
  EXPECT_THROW(batch_multiplier(policy, 1), Error);
}

TEST(Schedule, BadCallsAreErrors) {
  EXPECT_THROW(schedule_multiplier(policy("stairs", 0, 10), 1), Error);
  EXPECT_THROW(schedule_multiplier(policy("linear", 0, 0), 1), Error);
  EXPECT_THROW(schedule_multiplier(policy("constant", 0, 10), -1), Error);
}

}  // namespace
}  // namespace poise::optim
