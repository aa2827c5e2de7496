// The gradient noise scale against a gradient and a covariance that are known: samples x_i = g +
// e_i with a loss that is linear in the weights, so that a sample's gradient is x_i.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/noise_scale.h"
#include "poise/engine.h"
#include "support/ranks.h"
#include "support/tiny_model.h"

namespace poise {
namespace {

constexpr std::int64_t kWidth = 400;
constexpr double kNoise = 0.5;  // of each element

TEST(NoiseScale, SolvesTheTwoEquations) {
  engine::NoiseScale noise;
  EXPECT_EQ(noise.value(), 0);
  // |G|^2 = 4, tr = 60: over 10 tokens 4 + 6, over 40 tokens 4 + 1.5.
  noise.add({{10, 10}}, false, 5.5, 40);
  EXPECT_NEAR(noise.value(), 60.0 / 4, 1e-12);
  // Two ranks with 10 and 30 tokens of their own, one of them in shards of one gradient.
  engine::NoiseScale own, joined;
  own.add({{4 + 60.0 / 10, 10}, {4 + 60.0 / 30, 30}, {0, 0}}, false, 4 + 60.0 / 80, 80);
  EXPECT_NEAR(own.value(), 15, 1e-12);
  joined.add({{3, 10}, {4 + 60.0 / 40 - 3, 30}}, true, 4 + 60.0 / 80, 80);
  EXPECT_NEAR(joined.value(), 15, 1e-12);
  // One size says nothing; a gradient below the noise has no bound.
  engine::NoiseScale none, lost;
  none.add({{10, 40}}, false, 10, 40);
  EXPECT_EQ(none.value(), 0);
  lost.add({{6, 10}}, false, 1, 40);
  EXPECT_TRUE(std::isinf(lost.value()));
}

// A gradient that the loop mends after begin_update() is none that was measured.
TEST(NoiseScale, TakesNothingOfGradientsThatAreEdited) {
  auto weights = test::normal({kWidth}, 3).abs_().requires_grad_();
  Config config;
  config.optimizer.max_grad_norm = 0;
  config.engine.noise_scale = true;
  config.batch.accumulation = 2;
  Engine engine({{{"w", weights}}, {}, {}}, config);
  const auto backward = [&](const at::Tensor& of) { engine.backward(Loss::mean(of, 8)); };
  const auto window = [&](std::uint64_t seed) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      backward((test::normal({kWidth}, 10 * seed + i) + 1).matmul(weights));
    }
  };
  window(1);
  engine.step();
  backward((weights - weights.detach()).sqrt().sum());  // of infinite slope
  backward(weights.sum());
  engine.begin_update();
  engine.gradient("w").fill_(0.5);
  EXPECT_EQ(engine.step().status, Status::applied);
  window(2);
  EXPECT_TRUE(std::isfinite(engine.step().noise_scale));
}

class Measured : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Measured, IsThatOfTheSamples) {
  const auto [ranks, stage] = GetParam();
  std::vector<double> last(static_cast<std::size_t>(ranks));
  double without = -1;
  const auto g = test::normal({kWidth}, 5, 0.1);
  const double want = kWidth * kNoise * kNoise / g.pow(2).sum().item<double>();
  testing::on_ranks(ranks, [&](std::shared_ptr<comm::Group> group) {
    const auto rank = static_cast<std::size_t>(group->rank());
    for (const bool measures : {true, false}) {
      auto weights = at::zeros({kWidth}, at::kFloat).requires_grad_();
      Config config;
      config.optimizer.type = "sgd";
      config.optimizer.lr = 1e-3;
      config.optimizer.max_grad_norm = 0;
      config.zero.stage = stage;
      config.engine.noise_scale = measures;
      Engine engine({{{"w", weights}}, {}, {{"unit", {"w"}}}}, config, group);
      auto unit = engine.unit("unit");
      StepResult result;
      for (int window = 0; window < (measures ? 60 : 2); ++window) {
        result = engine.step(4, [&](std::size_t i) {
          const auto seed = 1000 * window + 10 * static_cast<int>(i) + static_cast<int>(rank);
          const auto samples =
              g + test::normal({8, kWidth}, static_cast<std::uint64_t>(seed), kNoise);
          const auto loss =
              unit([&](const at::Tensor& x) { return x.matmul(weights).mean(); }, samples);
          return Loss::mean(loss, 8);
        });
      }
      if (measures) {
        last[rank] = result.noise_scale;
      } else if (rank == 0) {
        without = result.noise_scale;
      }
    }
  });
  EXPECT_NEAR(last[0], want, 0.2 * want) << "tr(Sigma) / |G|^2";
  for (const double other : last) EXPECT_EQ(other, last[0]);
  EXPECT_EQ(without, 0);
}

INSTANTIATE_TEST_SUITE_P(Ways, Measured,
                         ::testing::Values(std::tuple(1, 0), std::tuple(2, 0), std::tuple(2, 2),
                                           std::tuple(3, 3)),
                         [](const auto& info) {
                           return join("w", std::get<0>(info.param), "_stage",
                                       std::get<1>(info.param));
                         });

}  // namespace
}  // namespace poise
