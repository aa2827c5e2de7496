// Every stage, world, split, precision and optimizer: the same bits within an order of reduction,
// and at most twice plain torch's error against float64.
#include <gtest/gtest.h>

#include "zero/training.h"

namespace poise {
namespace {

using test::Outcome;
using test::Training;

struct Case {
  std::string precision;  // fp32; bf16, fp16: fp32 parameters under autocast; bf16m, fp16m: masters
  std::string optimizer;
  double clip;
};

config::OptimizerPolicy optimizer_of(const Case& c) {
  config::OptimizerPolicy policy;
  test::set_type(policy, c.optimizer);
  policy.lr = 1e-2;
  policy.weight_decay = 0.1;
  policy.max_grad_norm = c.clip;
  if (policy.type == "lars") policy.trust_coefficient = 0.5;
  return policy;
}

config::DType dtype_of(const Case& c) {
  if (c.precision.rfind("bf16", 0) == 0) return config::DType::bf16;
  return c.precision.rfind("fp16", 0) == 0 ? config::DType::fp16 : config::DType::fp32;
}

Config config_of(const Case& c, int stage) {
  Config config;
  config.optimizer = optimizer_of(c);
  config.precision.dtype = dtype_of(c);
  if (c.precision.size() == 5) config.precision.parameters = config.precision.dtype;
  config.precision.initial_loss_scale = 4096;  // 2^-q of it, q = 4, is what PlainTraining scales by
  config.zero.stage = stage;
  return config;
}

class Parity : public ::testing::TestWithParam<std::tuple<Case, int, int>> {};

void expect_ranks_equal(const Outcome& outcome) {
  for (std::size_t rank = 1; rank < outcome.parameters.size(); ++rank) {
    EXPECT_EQ(test::first_difference(outcome.parameters[0], outcome.parameters[rank]), "");
    EXPECT_EQ(test::first_difference(outcome.masters[0], outcome.masters[rank]), "");
    for (std::size_t i = 0; i < outcome.results[0].size(); ++i) {
      EXPECT_EQ(outcome.results[0][i].loss, outcome.results[rank][i].loss);
      EXPECT_EQ(outcome.results[0][i].grad_norm, outcome.results[rank][i].grad_norm);
      EXPECT_EQ(outcome.results[0][i].tokens, outcome.results[rank][i].tokens);
      EXPECT_EQ(outcome.results[rank][i].status, Status::applied);
    }
  }
}

// Root mean square error of trained masters against the same training in float64.
double error_of(test::Values masters, test::PlainTraining& exact) {
  for (const auto& name : exact.model.frozen) masters.erase(name);  // 16-bit copies, never trained
  return test::rms_difference(masters, test::values_of(exact.model));
}

TEST_P(Parity, StagesAgreeAndStayNearFloat64) {
  const auto [c, ranks, k] = GetParam();
  Training run;
  run.ranks = ranks;
  run.window = test::equal_windows(ranks * k);

  test::PlainTraining exact(at::kDouble, at::kDouble, optimizer_of(c));
  const auto forward = dtype_of(c) == config::DType::fp32   ? at::kFloat
                       : dtype_of(c) == config::DType::bf16 ? at::kBFloat16
                                                            : at::kHalf;
  const bool masters = c.precision.size() == 5;
  test::PlainTraining plain(at::kFloat, forward, optimizer_of(c), masters ? forward : at::kFloat);
  std::vector<double> losses;
  for (int update = 0; update < run.updates; ++update) {
    losses.push_back(exact.step(run.window(update), 1e-2));
    plain.step(run.window(update), 1e-2);
  }
  const double of_plain = error_of(test::values_of(plain.model), exact);

  struct Way {
    std::string name;
    int stage;
    config::Reduce reduce = config::Reduce::automatic;
    config::KeepGathered keep = config::KeepGathered::no;
    std::int64_t small_below = 0;
  };
  const std::vector<Way> ways{
      {"0", 0},
      {"1", 1},
      {"3 last", 3, config::Reduce::last},
      {"2", 2},
      {"3", 3},
      {"3 kept", 3, config::Reduce::every, config::KeepGathered::window},
      {"3 small whole", 3, config::Reduce::every, config::KeepGathered::no, 10}};
  constexpr std::size_t kFirstLast = 0, kFirstEvery = 3;
  std::vector<Outcome> by_stage;
  const auto config_of_way = [&, c = c](const Way& way) {
    auto config = config_of(c, way.stage);
    config.zero.reduce = way.reduce;
    config.zero.keep_gathered = way.keep;
    config.zero.persistence_threshold = way.small_below;
    return config;
  };
  for (const auto& way : ways) {
    SCOPED_TRACE("stage " + way.name);
    run.config = config_of_way(way);
    by_stage.push_back(test::train(run));
    expect_ranks_equal(by_stage.back());
    EXPECT_LE(error_of(by_stage.back().masters[0], exact), 2 * of_plain);
    const double tolerance = forward == at::kFloat ? 1e-6 : forward == at::kHalf ? 2e-3 : 2e-2;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(by_stage.back().results[0][i].loss, losses[i], tolerance * losses[i]);
    }
  }
  for (std::size_t i = 0; i < ways.size(); ++i) {  // the same bits in each order of reduction
    SCOPED_TRACE("stage " + ways[i].name);
    const auto& same = by_stage[i < kFirstEvery ? kFirstLast : kFirstEvery];
    EXPECT_EQ(test::first_difference(same.masters[0], by_stage[i].masters[0]), "");
    EXPECT_EQ(test::first_difference(same.parameters[0], by_stage[i].parameters[0]), "");
  }

  // Overlap and when operations run change nothing.
  for (const std::size_t i : {1, 3, 4}) {
    SCOPED_TRACE("stage " + ways[i].name);
    run.config = config_of_way(ways[i]);
    run.config.zero.overlap = false;
    const auto apart = test::train(run);
    EXPECT_EQ(test::first_difference(apart.masters[0], by_stage[i].masters[0]), "");
    run.config.zero.overlap = true;
    if (c.precision != "fp32") continue;  // order of operations, not of arithmetic
    Stream::set_test_delay(7, 300);
    const auto delayed = test::train(run);
    Stream::set_test_delay(0, 0);
    EXPECT_EQ(test::first_difference(delayed.masters[0], by_stage[i].masters[0]), "");
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Case, int, int>>& info) {
  const auto& [c, ranks, k] = info.param;
  return join(c.precision, "_", c.optimizer, c.clip > 0 ? "_clip" : "", "_w", ranks, "_k", k);
}

// AdamW and SGD in every precision, clipped and not, and each of the other optimizers.
std::vector<Case> cases() {
  std::vector<Case> all{
      {"fp32", "lion", 0.5}, {"fp32", "lamb", 0.5}, {"bf16m", "lamb", 0}, {"fp32", "lars", 0.5}};
  for (const char* precision : {"fp32", "bf16", "bf16m", "fp16", "fp16m"}) {
    for (const char* optimizer : {"adamw", "sgd"}) {
      for (const double clip : {0.5, 0.0}) all.push_back({precision, optimizer, clip});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Grid, Parity,
                         ::testing::Combine(::testing::ValuesIn(cases()),
                                            ::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(1, 3, 4)),
                         name_of);

}  // namespace
}  // namespace poise
