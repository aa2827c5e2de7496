// Windows over several ranks: uneven counts, statuses, gradients read and written, the three calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "zero/training.h"

namespace poise {
namespace {

using test::GridModel;
using test::Outcome;
using test::Training;

Config config_of(int stage) {
  Config config;
  config.optimizer = test::adamw();
  config.zero.stage = stage;
  return config;
}

class Stages : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(All, Stages, ::testing::Values(0, 1, 2, 3));

class UnevenWindows : public ::testing::TestWithParam<std::tuple<int, std::vector<std::size_t>>> {};

TEST_P(UnevenWindows, GiveTheTrainingOfTheirMicroBatches) {
  const auto [stage, counts] = GetParam();
  const int micro_batches = static_cast<int>(counts[0] + counts[1]);
  Training run{.ranks = 2,
               .updates = 4,
               .config = config_of(stage),
               .window = test::equal_windows(micro_batches),
               .counts = counts};
  const auto outcome = test::train(run);
  test::PlainTraining exact(at::kDouble, at::kDouble, test::adamw()),
      plain(at::kFloat, at::kFloat, test::adamw());
  for (int update = 0; update < run.updates; ++update) {
    exact.step(run.window(update), 1e-2);
    plain.step(run.window(update), 1e-2);
  }
  const auto expected = test::values_of(exact.model);
  EXPECT_LE(test::rms_difference(outcome.parameters[0], expected),
            2 * test::rms_difference(test::values_of(plain.model), expected));
  EXPECT_EQ(test::first_difference(outcome.parameters[0], outcome.parameters[1]), "");
}
INSTANTIATE_TEST_SUITE_P(Counts, UnevenWindows,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(std::vector<std::size_t>{3, 2},
                                                              std::vector<std::size_t>{2, 3},
                                                              std::vector<std::size_t>{3, 0},
                                                              std::vector<std::size_t>{0, 2})));

TEST_P(Stages, AWindowWithoutAnyMicroBatchIsAnErrorOnAllRanks) {
  const auto errors = testing::errors_on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Engine engine(model.view(), config_of(GetParam()), group);
    model.bind(engine);
    engine.step(0, [](std::size_t) { return Loss(); });
  });
  for (const auto& error : errors) EXPECT_THAT(error, ::testing::HasSubstr("no micro-batches"));
}

// At stage 3 a rank without a micro-batch follows to the end and has measured nothing of the first.
TEST(NoiseScale, LeavesOutWindowsInWhichARankHadNoMicroBatch) {
  // The scale after an even window and after one of these counts.
  const auto after = [](const std::vector<std::size_t>& counts) {
    std::pair<double, double> seen;
    testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
      at::set_num_threads(1);
      Training run{.ranks = 2, .config = config_of(3), .window = test::equal_windows(4)};
      run.config.engine.noise_scale = true;
      GridModel model;
      Engine engine(model.view(), run.config, group);
      model.bind(engine);
      const auto scale = [&](int update, const std::vector<std::size_t>& of_ranks) {
        run.counts = of_ranks;
        const auto loss = [&](const at::Tensor& b) {
          return Loss::sum(model.loss_sum(b), test::counted(b));
        };
        return engine.step(test::share_of(run, run.window(update), group->rank()), loss)
            .noise_scale;
      };
      const double first = scale(0, {2, 2}), second = scale(1, counts);
      if (group->rank() == 0) seen = {first, second};
    });
    return seen;
  };
  const auto even = after({2, 2}), uneven = after({4, 0});
  EXPECT_EQ(even.first, uneven.first);
  EXPECT_NE(even.second, even.first);
  EXPECT_EQ(uneven.second, uneven.first);
}

// One rank's loss (or count, or gradient) decides the status of all.
struct Fault {
  std::string name;
  config::DType dtype;
  std::function<Loss(const GridModel&, const at::Tensor&)> loss_on_rank_1;
  Status status;
};

class OneRankDecides : public ::testing::TestWithParam<std::tuple<int, Fault>> {};

TEST_P(OneRankDecides, NothingChangesOnAnyRank) {
  const auto& [stage, fault] = GetParam();
  testing::on_ranks(2, [&, stage = stage, fault = fault](std::shared_ptr<comm::Group> group) {
    GridModel model;
    auto config = config_of(stage);
    config.precision.dtype = fault.dtype;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const auto before = test::values_of(engine, model);
    const double scale = engine.loss_scale();
    const std::vector<at::Tensor> window{test::make_tokens(2, 5), test::make_tokens(2, 6)};
    const auto result = engine.step(window, [&](const at::Tensor& b) {
      if (group->rank() == 1) return fault.loss_on_rank_1(model, b);
      return Loss::sum(model.loss_sum(b), test::counted(b));
    });
    EXPECT_EQ(result.status, fault.status);
    EXPECT_EQ(test::first_difference(before, test::values_of(engine, model)), "");
    EXPECT_EQ(engine.loss_scale(), fault.status == Status::overflow ? scale / 2 : scale);
    EXPECT_EQ(engine.updates(), 0);
    if (fault.status == Status::overflow || fault.status == Status::nonfinite_gradient) {
      EXPECT_EQ(result.first_bad_parameter, "embedding");
    }
    // and the next window trains
    const auto next = engine.step(window, [&](const at::Tensor& b) {
      return Loss::sum(model.loss_sum(b), test::counted(b));
    });
    EXPECT_EQ(next.status, Status::applied);
  });
}

// The loss is finite, the gradient of one parameter is not.
Loss with_infinite_gradient(const GridModel& model, const at::Tensor& batch) {
  const auto x = model.embedding.sum();
  return Loss::sum(model.loss_sum(batch) + at::sqrt(x - x) * 1.0, test::counted(batch));
}
Loss nonfinite(const GridModel& model, const at::Tensor& batch) {
  return Loss::sum(model.loss_sum(batch) * std::numeric_limits<double>::infinity(),
                   test::counted(batch));
}

INSTANTIATE_TEST_SUITE_P(
    Faults, OneRankDecides,
    ::testing::Combine(::testing::Values(0, 1, 2, 3),
                       ::testing::Values(Fault{"overflow", config::DType::fp16,
                                               with_infinite_gradient, Status::overflow},
                                         Fault{"gradient", config::DType::fp32,
                                               with_infinite_gradient, Status::nonfinite_gradient},
                                         Fault{"loss", config::DType::fp32, nonfinite,
                                               Status::nonfinite_loss})),
    [](const auto& info) {
      return join("stage", std::get<0>(info.param), "_", std::get<1>(info.param).name);
    });

// A rank whose tokens are all masked out: mean over nothing, count 0.
TEST_P(Stages, ARankThatCountsNothingTakesPartWithZeros) {
  const auto loss = [](const GridModel& model, const at::Tensor& b, bool masked) {
    return masked ? Loss::mean(model.loss_sum(b) / 0.0, 0.0)
                  : Loss::sum(model.loss_sum(b), test::counted(b));
  };
  GridModel alone;
  Engine one(alone.view(), config_of(0));
  const auto window = test::equal_windows(2)(0);
  one.step(window, [&](const at::Tensor& b) { return loss(alone, b, false); });
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Engine engine(model.view(), config_of(GetParam()), group);
    model.bind(engine);
    const auto result = engine.step(
        window, [&](const at::Tensor& b) { return loss(model, b, group->rank() == 1); });
    EXPECT_EQ(result.status, Status::applied);
    EXPECT_EQ(result.tokens, test::counted(window[0]) + test::counted(window[1]));
    EXPECT_LE(test::rms_difference(test::values_of(engine, model), test::values_of(alone)), 1e-6);
  });
}

TEST_P(Stages, GradientsAreWholeMeansAndMayBeWritten) {
  auto config = config_of(GetParam());
  config.batch.accumulation = 2;
  const auto window = test::equal_windows(4)(0);
  test::PlainTraining exact(at::kDouble, at::kDouble, test::adamw());
  double tokens = 0;
  at::Tensor total = at::zeros({}, at::kDouble);
  for (const auto& batch : window) {
    total = total + exact.model.loss_sum(batch);
    tokens += test::counted(batch);
  }
  const auto wanted = torch::autograd::grad({total / tokens},
                                            {exact.model.embedding, exact.model.blocks[1].weight});
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const auto loss = [&](const at::Tensor& b) {
      return Loss::sum(model.loss_sum(b), test::counted(b));
    };
    auto share_of = [&](int rank) {
      return std::vector<at::Tensor>{window[static_cast<std::size_t>(2 * rank)],
                                     window[static_cast<std::size_t>(2 * rank + 1)]};
    };
    for (const auto& b : share_of(group->rank())) {
      const auto scope = engine.forward_scope();
      engine.backward(loss(b));
    }
    engine.begin_update();
    const auto embedding = engine.gradient("embedding");
    const auto weight = engine.gradient("blocks.1.weight");
    EXPECT_LE((embedding - wanted[0]).abs().max().item<double>(), 1e-6);
    EXPECT_LE((weight - wanted[1]).abs().max().item<double>(), 1e-6);
    weight.mul_(3);
    const auto result = engine.step(Last::yes);
    const auto squares = [](const at::Tensor& t) {
      return t.to(at::kDouble).pow(2).sum().item<double>();
    };
    EXPECT_GT(result.grad_norm, 3 * std::sqrt(squares(wanted[1])));
    EXPECT_EQ(result.status, Status::applied);
  });
}

TEST_P(Stages, ThreeCallsGiveTheBitsOfTheWindow) {
  auto config = config_of(GetParam());
  config.batch.accumulation = 2;
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    GridModel by_window, by_calls;
    Engine window_engine(by_window.view(), config, group);
    Engine calls_engine(by_calls.view(), config, group);
    by_window.bind(window_engine);
    by_calls.bind(calls_engine);
    for (int update = 0; update < 3; ++update) {
      auto window = test::equal_windows(4)(update + 10 * group->rank());
      window.resize(update == 2 ? 1 : 2);  // the last one is partial
      window_engine.step(window, [&](const at::Tensor& b) {
        return Loss::sum(by_window.loss_sum(b), test::counted(b));
      });
      for (const auto& b : window) {
        const auto scope = calls_engine.forward_scope();
        calls_engine.backward(Loss::sum(by_calls.loss_sum(b), test::counted(b)));
      }
      calls_engine.step(update == 2 ? Last::yes : Last::no);
    }
    EXPECT_EQ(test::first_difference(test::values_of(window_engine, by_window),
                                     test::values_of(calls_engine, by_calls)),
              "");
  });
}

TEST_P(Stages, AnEditOnAllRanksReachesTheMasters) {
  auto config = config_of(GetParam());
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  testing::on_ranks(3, [&](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    {
      // At stage 3 whole parameters exist in gathered() only, and one rank's edit is everybody's.
      const bool sharded = config.zero.stage == 3;
      auto whole = engine.gathered(sharded ? std::optional(1) : std::nullopt);
      at::NoGradGuard no_grad;
      if (!sharded || group->rank() == 1) {
        model.embedding.fill_(0.25);
        model.blocks[0].scale.fill_(2);
      }
    }
    engine.step(test::equal_windows(1)(0), [&](const at::Tensor& b) {
      return Loss::sum(model.loss_sum(b), test::counted(b));
    });
    // one update of AdamW moves a value by about lr = 1e-2, after a decay of 1e-3 of it
    EXPECT_LE((engine.master("embedding") - 0.25).abs().max().item<double>(), 0.011);
    EXPECT_LE((engine.master("blocks.0.scale") - 2).abs().max().item<double>(), 0.011);
  });
}

}  // namespace
}  // namespace poise
