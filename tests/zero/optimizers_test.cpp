// Optimizers beyond AdamW and SGD over ranks: what is rounded at random, kept in blocks or needs
// sums over whole parameters is the same bits at every stage of one order of reduction.
#include <gtest/gtest.h>

#include "support/temp_folder.h"
#include "zero/training.h"

namespace poise {
namespace {

using test::Outcome;
using test::Training;

class Optimizers : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

Config config_of(const std::string& optimizer, int stage,
                 config::Reduce reduce = config::Reduce::automatic) {
  Config config;
  config.optimizer = test::adamw();
  test::set_type(config.optimizer, optimizer);
  if (config.optimizer.type == "lars") config.optimizer.trust_coefficient = 0.5;
  config.optimizer.groups = {{"*.bias", 0.5, 0}};
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  config.zero.stage = stage;
  config.zero.reduce = reduce;
  return config;
}

TEST_P(Optimizers, StagesOfOneOrderOfReductionAreTheSameBits) {
  const auto [optimizer, ranks] = GetParam();
  Training run;
  run.ranks = ranks;
  run.updates = 4;
  run.window = test::equal_windows(ranks * 2);
  std::vector<std::pair<std::string, Outcome>> last, every;
  const auto add = [&, o = optimizer](auto& to, const std::string& name, Config config) {
    run.config = config;
    to.emplace_back(name, test::train(run));
  };
  add(last, "0", config_of(optimizer, 0));
  add(last, "1", config_of(optimizer, 1));
  add(last, "3 last", config_of(optimizer, 3, config::Reduce::last));
  add(every, "2", config_of(optimizer, 2));
  add(every, "3", config_of(optimizer, 3));
  auto small = config_of(optimizer, 3);
  small.zero.persistence_threshold = 10;
  add(every, "3 small whole", small);
  for (const auto& ways : {last, every}) {
    for (const auto& [name, outcome] : ways) {
      SCOPED_TRACE("stage " + name);
      for (const auto& masters : outcome.masters) {
        EXPECT_EQ(test::first_difference(ways[0].second.masters[0], masters), "");
      }
      EXPECT_EQ(test::first_difference(ways[0].second.parameters[0], outcome.parameters[0]), "");
    }
  }
  // And the test is about something: the optimizers are not all one.
  run.config = config_of("sgd", 0);
  EXPECT_NE(test::first_difference(test::train(run).masters[0], last[0].second.masters[0]), "");
}

INSTANTIATE_TEST_SUITE_P(
    Grid, Optimizers,
    ::testing::Combine(::testing::Values("adafactor", "lion", "lamb", "lars", "adamw_bf16",
                                         "adam_bf16", "adamw_8bit", "lion_8bit"),
                       ::testing::Values(1, 2, 3)),
    [](const auto& info) { return join(std::get<0>(info.param), "_w", std::get<1>(info.param)); });

// Parameters that several ranks hold pieces of: rows of 256 elements, one of them by columns.
struct WideModel {
  at::Tensor by_rows = test::normal({40, 50}, 1, 0.2).requires_grad_();
  at::Tensor by_columns = test::normal({50, 40}, 2, 0.2).t().requires_grad_();
  at::Tensor bias = test::normal({700}, 3, 0.2).requires_grad_();

  ModelView view() const {
    return {{{"by_rows", by_rows}, {"by_columns", by_columns}, {"bias", bias}},
            {},
            {{"unit", {"by_rows", "by_columns", "bias"}}}};
  }
  at::Tensor loss(const at::Tensor& x) const {
    const auto hidden = x.matmul(by_rows).tanh().matmul(by_columns.t());
    return (hidden.sum() + (bias * bias.sin()).sum() * x.sum()).pow(2) / 100;
  }
};

// By rank: masters after four updates of six micro-batches, all ranks together.
std::vector<test::Values> train_wide(const Config& config, int ranks) {
  std::vector<test::Values> masters(static_cast<std::size_t>(ranks));
  testing::on_ranks(ranks,
                    [&](std::shared_ptr<comm::Group> group) {
                      at::set_num_threads(1);
                      const WideModel model;
                      Engine engine(model.view(), config, group);
                      auto unit = engine.unit("unit");
                      const auto each = static_cast<std::size_t>(6 / ranks);
                      for (int update = 0; update < 4; ++update) {
                        engine.step(each, [&](std::size_t i) {
                          const auto number = static_cast<std::uint64_t>(
                              100 * update + each * static_cast<std::size_t>(group->rank()) + i);
                          const auto x = test::normal({3, 40}, number);
                          const auto loss =
                              unit([&](const at::Tensor& input) { return model.loss(input); }, x);
                          return Loss::sum(loss, 3);
                        });
                      }
                      auto& mine = masters[static_cast<std::size_t>(group->rank())];
                      for (const auto& [name, tensor] : model.view().parameters) {
                        mine[name] = engine.master(name).clone();
                      }
                    },
                    {.timeout = std::chrono::seconds(60)});
  return masters;
}

TEST_P(Optimizers, PiecesOfAParameterAreUpdatedAsOne) {
  const auto [optimizer, ranks] = GetParam();
  const auto config_for = [&, o = optimizer](int stage, config::Reduce reduce) {
    auto config = config_of(o, stage, reduce);
    config.optimizer.groups.clear();
    config.precision = {};
    return config;
  };
  using config::Reduce;
  const auto first = train_wide(config_for(0, Reduce::automatic), ranks);
  for (const auto& [stage, reduce] : {std::pair(1, Reduce::automatic), {3, Reduce::last}}) {
    for (const auto& masters : train_wide(config_for(stage, reduce), ranks)) {
      EXPECT_EQ(test::first_difference(first[0], masters), "") << "stage " << stage;
    }
  }
  const auto every = train_wide(config_for(2, Reduce::automatic), ranks);
  for (const auto& masters : train_wide(config_for(3, Reduce::automatic), ranks)) {
    EXPECT_EQ(test::first_difference(every[0], masters), "");
  }
  if (optimizer.rfind("lion", 0) == 0) return;  // a sign may turn in the last bit of a sum
  // As on one rank, but for the order of sums; the norms of pieces alone would be far off.
  const auto alone = train_wide(config_for(0, Reduce::automatic), 1);
  const bool rounds = optimizer.find('_') != std::string::npos;
  EXPECT_LE(test::rms_difference(first[0], alone[0]), rounds ? 2e-3 : 1e-5);
}

// The loss after 60 updates is that of fp32 moments, to less than what training makes of it.
TEST(MomentsInFewerBits, TrainAsFp32OnesDo) {
  Training run;
  run.ranks = 1;
  run.updates = 60;
  run.window = [](int) {  // one batch, learnt by heart
    return std::vector<at::Tensor>{test::make_tokens(4, 1), test::make_tokens(4, 2)};
  };
  const auto last_loss = [&](const std::string& name) {
    run.config = config_of(name, 0);
    run.config.precision = {};
    return test::train(run).results[0].back().loss;
  };
  run.updates = 1;
  const double start = last_loss("adamw");
  run.updates = 60;
  const double want = last_loss("adamw");
  ASSERT_LT(want, 0.7 * start);
  for (const char* name : {"adamw_bf16", "adamw_8bit"}) {
    EXPECT_NEAR(last_loss(name), want, 0.05 * (start - want)) << name;
  }
  const double lion = last_loss("lion");
  ASSERT_LT(lion, 0.7 * start);
  EXPECT_NEAR(last_loss("lion_8bit"), lion, 0.05 * (start - lion));
}

TEST(WholeParameters, StatesThatMustStayOnTheDeviceAreNotOffloaded) {
  for (const char* name : {"adafactor", "lamb", "lars"}) {
    auto config = config_of(name, 0);
    config.offload.optimizer = config::Offload::host;
    const auto message = testing::message_of([&] { config.validate(); });
    EXPECT_NE(message.find(join("optimizer.type ", name, " needs sums over whole parameters")),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("leave offload.optimizer out"), std::string::npos) << message;
    config.offload = {};
    config.offload.gradients = config::Offload::host;
    EXPECT_THROW(config.validate(), Error);
    config.offload = {};
    config.offload.activations = config::Offload::host;
    EXPECT_NO_THROW(config.validate());
  }
}

}  // namespace
}  // namespace poise
