// States away from the device change no bit: every stage, precision and optimizer, with
// accumulation, clipping, loss scaling and windows that are skipped, under random delays too.
#include <gtest/gtest.h>

#include "data/temp_dir.h"
#include "zero/training.h"

namespace poise {
namespace {

using config::Offload;
using test::Outcome;
using test::Training;

// Blocks of one page, so that the small model's states take several tiles.
void to_file(Config& config, const data::TempDir& folder) {
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
  config.optimizer.type = c.optimizer;
  if (c.optimizer == "sgd") config.optimizer.momentum = 0.9;
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

  data::TempDir folder;
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
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Case, int, int>>& info) {
  const auto& [c, ranks, stage] = info.param;
  return join(c.precision, "_", c.optimizer, "_w", ranks, "_stage", stage);
}

INSTANTIATE_TEST_SUITE_P(
    Grid, Offloaded,
    ::testing::Combine(::testing::Values(Case{"fp32", "adamw"}, Case{"bf16", "adamw"},
                                         Case{"fp16", "adamw"}, Case{"bf16", "sgd"}),
                       ::testing::Values(1, 2), ::testing::Values(0, 1, 2, 3)),
    name_of);

}  // namespace
}  // namespace poise
