// Hybrid sharding: 2 x 2 ranks, sharded inside pairs and replicated across them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temp_folder.h"
#include "zero/mesh.h"
#include "zero/training.h"

namespace poise {
namespace {

using test::GridModel;
using test::Mesh;
using ::testing::HasSubstr;

class Hybrid : public ::testing::TestWithParam<std::tuple<int, std::vector<std::size_t>>> {};

TEST_P(Hybrid, TrainsAsTheWorldDoes) {
  const auto [stage, counts] = GetParam();
  test::Training run;
  run.ranks = 4;
  run.counts = counts;
  std::size_t micro_batches = 0;
  for (const auto count : counts) micro_batches += count;
  run.window = test::equal_windows(static_cast<int>(micro_batches));
  test::PlainTraining exact(at::kDouble, at::kDouble, test::adamw()),
      plain(at::kFloat, at::kFloat, test::adamw());
  std::vector<double> losses;
  for (int update = 0; update < 3; ++update) {
    losses.push_back(exact.step(run.window(update), 1e-2));
    plain.step(run.window(update), 1e-2);
  }
  const auto expected = test::values_of(exact.model);
  const double allowed = 2 * test::rms_difference(test::values_of(plain.model), expected);

  Mesh mesh;
  std::vector<test::Values> ended(4);
  testing::on_ranks(4, [&, stage = stage](std::shared_ptr<comm::Group> all) {
    at::set_num_threads(1);
    GridModel model;
    Config config;
    config.optimizer = test::adamw();
    config.zero.stage = stage;
    if (stage > 0) config.zero.shard_group_size = 2;
    Engine engine(model.view(), config, mesh.of(all));
    model.bind(engine);
    for (int update = 0; update < 3; ++update) {
      const auto share = test::share_of(run, run.window(update), all->rank());
      const auto result = engine.step(share, [&](const at::Tensor& b) {
        return Loss::sum(model.loss_sum(b), test::counted(b));
      });
      EXPECT_EQ(result.status, Status::applied);
      EXPECT_NEAR(result.loss, losses[static_cast<std::size_t>(update)], 1e-5);
    }
    ended[static_cast<std::size_t>(all->rank())] = test::values_of(engine, model);
  });
  EXPECT_LE(test::rms_difference(ended[0], expected), allowed);
  for (std::size_t rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(test::first_difference(ended[0], ended[rank]), "") << rank;
  }
}
INSTANTIATE_TEST_SUITE_P(Stages, Hybrid,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(std::vector<std::size_t>{2, 2, 2, 2},
                                                              std::vector<std::size_t>{3, 2, 0,
                                                                                       1})));

// Sums in files go to the other shard group when the window is complete, one after the other.
TEST(HybridOffload, GradientsInFilesGiveTheBitsOfTheDevice) {
  testing::TempFolder folder;
  std::vector<test::Values> ended[2];
  for (const bool file : {false, true}) {
    Mesh mesh;
    ended[file].resize(4);
    Stream::set_test_delay(7, file ? 100 : 0);
    testing::on_ranks(4, [&](std::shared_ptr<comm::Group> all) {
      at::set_num_threads(1);
      GridModel model;
      Config config;
      config.optimizer = test::adamw();
      config.zero.stage = 2;
      if (file) {
        config.offload.gradients = config::Offload::file;
        config.offload.directory = folder.path();
        config.offload.block_bytes = 4096;
        config.offload.staging_bytes = 16 * 4096;
      }
      Engine engine(model.view(), config, mesh.of(all));
      model.bind(engine);
      for (int update = 0; update < 3; ++update) {
        const auto windows = test::equal_windows(8);
        test::Training run;
        run.ranks = 4;
        const auto share = test::share_of(run, windows(update), all->rank());
        engine.step(share, [&](const at::Tensor& b) {
          return Loss::sum(model.loss_sum(b), test::counted(b));
        });
      }
      ended[file][static_cast<std::size_t>(all->rank())] = test::values_of(engine, model);
    });
    Stream::set_test_delay(0, 0);
  }
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(test::first_difference(ended[0][rank], ended[1][rank]), "") << rank;
  }
}

// Bytes are split by the pair, not by the world.
TEST(HybridCost, ShardsOfThePair) {
  Mesh mesh;
  testing::on_ranks(4, [&](std::shared_ptr<comm::Group> all) {
    at::set_num_threads(1);
    const auto weight = test::normal({256, 256}, 1).requires_grad_();
    Config config;
    config.zero.stage = 2;
    Engine engine(ModelView{{{"weight", weight}}, {}, {{"unit", {"weight"}}}}, config,
                  mesh.of(all));
    const auto books = engine.ledger().snapshot();
    constexpr auto optimizer = static_cast<std::size_t>(memory::Account::optimizer);
    EXPECT_EQ(books.current[optimizer], 8 * 256 * 256 / 2);
  });
}

TEST(HybridCost, GroupsOfAnotherSizeThanTheConfigSaysAreRefused) {
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> all) {
    GridModel model;
    Config config;
    config.zero.stage = 3;
    config.zero.shard_group_size = 1;
    try {
      Engine engine(model.view(), config, all);
      ADD_FAILURE() << "both ranks shard among themselves";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("zero.shard_group_size is 1, but of the 2 ranks given 2"));
    }
  });
  GridModel model;
  Config config;
  config.zero.stage = 3;
  config.zero.shard_group_size = 8;
  EXPECT_NO_THROW(Engine(model.view(), config)) << "with one rank nothing is sharded";
}

TEST(HybridCost, GroupsThatDoNotFitAreRefused) {
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> all) {
    GridModel model;
    try {
      Engine engine(model.view(), Config{}, comm::Ranks{all, all, all});
      ADD_FAILURE() << "a shard group and replicas of two ranks each in a world of two";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("of 2 in its shard group"));
    }
  });
}

}  // namespace
}  // namespace poise
