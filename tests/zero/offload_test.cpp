// States away from the device change no bit: every stage, precision and optimizer, with
// accumulation, clipping, loss scaling and windows that are skipped, under random delays too.
#include <gtest/gtest.h>

#include "support/temp_folder.h"
#include "zero/training.h"

namespace poise {
namespace {

using config::Offload;
using test::Outcome;
using test::Training;

// Blocks of one page, so that the small model's states take several tiles.
void to_file(Config& config, const testing::TempFolder& folder) {
  config.offload.optimizer = Offload::file;
  config.offload.directory = folder.path();
  config.offload.block_bytes = 4096;
  config.offload.staging_bytes = 16 * 4096;
  config.offload.queue_depth = 2;
}

void expect_same(const Outcome& one, const Outcome& other) {
  for (std::size_t rank = 0; rank < one.results.size(); ++rank) {
    EXPECT_EQ(test::first_difference(one.parameters[rank], other.parameters[rank]), "");
    EXPECT_EQ(test::first_difference(one.masters[rank], other.masters[rank]), "");
    for (std::size_t i = 0; i < one.results[rank].size(); ++i) {
      const auto &a = one.results[rank][i], &b = other.results[rank][i];
      EXPECT_EQ(a.status, b.status) << "update " << i;
      EXPECT_TRUE(a.grad_norm == b.grad_norm ||
                  (std::isnan(a.grad_norm) && std::isnan(b.grad_norm)));
      EXPECT_EQ(a.loss, b.loss);
      EXPECT_EQ(a.loss_scale, b.loss_scale);
      EXPECT_EQ(a.lr, b.lr);
    }
  }
}

// Gradients, parameters and activations, each alone.
std::vector<std::pair<std::string, config::OffloadPolicy>> further(
    const config::OffloadPolicy& file, bool gathers, bool own_sums) {
  std::vector<std::pair<std::string, config::OffloadPolicy>> ways(2);
  ways[0].first = "gradients";
  ways[0].second.gradients = Offload::host;
  ways[1].first = "activations to host";
  ways[1].second.activations = Offload::host;
  ways.emplace_back("activations to file", file);
  ways.back().second.optimizer = Offload::none;
  ways.back().second.activations = Offload::file;
  if (own_sums) {
    ways.emplace_back("gradients to file", file);
    ways.back().second.optimizer = Offload::none;
    ways.back().second.gradients = Offload::file;
    ways.emplace_back("gradients and states to file", file);
    ways.back().second.gradients = Offload::file;
  }
  if (gathers) {
    ways.emplace_back();
    ways.back().first = "parameters to host";
    ways.back().second.parameters = Offload::host;
    ways.emplace_back("parameters to file", file);
    ways.back().second.optimizer = Offload::none;
    ways.back().second.parameters = Offload::file;
  }
  ways.emplace_back("everything", file);
  auto& everything = ways.back().second;
  everything.gradients = own_sums ? Offload::file : Offload::host;
  everything.activations = Offload::host;
  if (gathers) everything.parameters = Offload::file;
  for (auto& [name, way] : ways) way.activation_min_bytes = 1;
  return ways;
}

struct Case {
  std::string precision;  // fp32, or 16-bit parameters with masters
  std::string optimizer;
};

Training training_of(const Case& c, int ranks, int stage) {
  Training run;
  run.ranks = ranks;
  run.updates = 4;
  run.window = test::equal_windows(ranks * 2);
  auto& config = run.config;
  config.optimizer = test::adamw();
  test::set_type(config.optimizer, c.optimizer);
  config.optimizer.groups = {{"*.bias", 0.5, 0}};
  config.schedule.type = "linear";
  config.schedule.warmup_updates = 1;
  config.schedule.total_updates = 10;
  config.zero.stage = stage;
  if (c.precision != "fp32") {
    config.precision.dtype = c.precision == "bf16" ? config::DType::bf16 : config::DType::fp16;
    config.precision.parameters = config.precision.dtype;
    config.precision.initial_loss_scale = 1 << 24;  // overflows first: skipped updates are part
    config.precision.loss_scale_backoff = 1.0 / 256;
  }
  return run;
}

class Offloaded : public ::testing::TestWithParam<std::tuple<Case, int, int>> {};

TEST_P(Offloaded, GivesTheBitsOfTheDevice) {
  const auto [c, ranks, stage] = GetParam();
  auto run = training_of(c, ranks, stage);
  const auto plain = test::train(run);
  EXPECT_EQ(plain.results[0][0].status, c.precision == "fp16" ? Status::overflow : Status::applied);

  run.config.offload.optimizer = Offload::host;
  expect_same(plain, test::train(run));
  run.config.offload.optimizer_fraction = 0.3;
  expect_same(plain, test::train(run));

  testing::TempFolder folder;
  run.config.offload.optimizer_fraction = 1;
  to_file(run.config, folder);
  Stream::set_test_delay(5, 100);
  const auto filed = test::train(run);
  Stream::set_test_delay(0, 0);
  expect_same(plain, filed);
  for (const auto& result : filed.results[0]) {
    EXPECT_GT(result.file_bytes, 0);
    EXPECT_LE(result.host_bytes, run.config.offload.staging_bytes + 2 * 2 * 4096);
  }
  run.config.offload.optimizer_fraction = 0.6;
  run.config.offload.io = config::OffloadIo::threads;
  expect_same(plain, test::train(run));
  run.config.offload.optimizer_fraction = 1;

  const bool own_sums = ranks == 1 || config::reduces_every_micro_batch(run.config.zero);
  for (const auto& [name, way] : further(run.config.offload, stage == 3 || ranks == 1, own_sums)) {
    SCOPED_TRACE(name);
    run.config.offload = way;
    Stream::set_test_delay(6, 100);
    expect_same(plain, test::train(run));
    Stream::set_test_delay(0, 0);
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Case, int, int>>& info) {
  const auto& [c, ranks, stage] = info.param;
  return join(c.precision, "_", c.optimizer, "_w", ranks, "_stage", stage);
}

INSTANTIATE_TEST_SUITE_P(
    Grid, Offloaded,
    ::testing::Combine(::testing::Values(Case{"fp32", "adamw"}, Case{"bf16", "adamw"},
                                         Case{"fp16", "adamw"}, Case{"bf16", "sgd"},
                                         Case{"bf16", "lion"}, Case{"bf16", "adamw_bf16"},
                                         Case{"fp32", "adamw_8bit"}),
                       ::testing::Values(1, 2), ::testing::Values(0, 1, 2, 3)),
    name_of);

TEST(OffloadedParameters, NeedRanksThatShardThem) {
  auto run = training_of({"fp32", "adamw"}, 2, 2);
  run.config.offload.parameters = Offload::host;
  const auto message = testing::message_of([&] { test::train(run); });
  EXPECT_NE(message.find("set zero.stage to 3"), std::string::npos) << message;
}

TEST(OffloadedGradients, InAFileNeedRanksThatShardThem) {
  testing::TempFolder folder;
  for (const int stage : {0, 1, 3}) {
    auto run = training_of({"fp32", "adamw"}, 2, stage);
    to_file(run.config, folder);
    run.config.offload.gradients = Offload::file;
    if (stage == 3) run.config.zero.reduce = config::Reduce::last;
    const auto message = testing::message_of([&] { test::train(run); });
    EXPECT_NE(message.find("offload.gradients is file on 2 ranks"), std::string::npos) << message;
    EXPECT_NE(message.find("set zero.stage to 2, or to 3 with zero.reduce every"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace poise
