// What sharding costs and saves: bytes by account and rank, and bytes on the wire, against the
// formulas of the papers.
#include <gtest/gtest.h>

#include <array>
#include <iostream>
#include <string>

#include "zero/training.h"

namespace poise {
namespace {

// Blocks of matrices only, so that padding is small against them.
struct WideModel {
  static constexpr int kBlocks = 6;
  static constexpr std::int64_t kWidth = 256;
  std::vector<at::Tensor> weights;
  std::vector<zero::Unit> units = std::vector<zero::Unit>(kBlocks);
  void bind(const Engine& engine) {
    for (std::size_t i = 0; i < units.size(); ++i) units[i] = engine.unit(join("block", i));
  }
  explicit WideModel(std::int64_t width = kWidth) {
    for (int i = 0; i < kBlocks; ++i) {
      weights.push_back(
          test::normal({width, width}, static_cast<std::uint64_t>(i), 0.05).requires_grad_());
    }
  }
  ModelView view() const {
    ModelView made;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto name = join("block", i, ".weight");
      made.parameters.push_back({name, weights[i]});
      made.units.push_back({join("block", i), {name}});
    }
    return made;
  }
  at::Tensor loss(at::Tensor x) const {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto& w = weights[i];
      x = units[i](
          [&](const at::Tensor& y) { return at::gelu(at::linear(y.to(w.scalar_type()), w)); }, x);
    }
    return x.to(at::kFloat).pow(2).mean();
  }
  static constexpr double kParameters = 1.0 * kBlocks * kWidth * kWidth;
};

// What this rank sends in a window of k micro-batches, after one that comes first.
double bytes_of_a_window(const WideModel& model, Engine& engine, int k) {
  std::vector<at::Tensor> window;
  for (int i = 0; i < k; ++i) {
    const auto x = test::normal({4, WideModel::kWidth}, static_cast<std::uint64_t>(i));
    window.push_back(x.requires_grad_());
  }
  const auto loss = [&](const at::Tensor& x) { return Loss(model.loss(x)); };
  engine.step(window, loss);
  engine.group().reset_traffic();
  engine.step(window, loss);
  double moved = 0;
  for (const auto bytes : engine.group().traffic().bytes) moved += static_cast<double>(bytes);
  return moved;
}

using Params = std::tuple<int, int, bool>;  // stage, ranks, 16-bit parameters with masters
class Cost : public ::testing::TestWithParam<Params> {};

struct Account {
  const char* name;
  memory::Account account;
  double bytes;  // by the formula
};

// 25M parameters. Prints what rank 0 holds.
TEST_P(Cost, BytesPerRankFollowTheFormula) {
  const auto [stage, ranks, half] = GetParam();
  testing::on_ranks(ranks, [&, stage = stage, ranks = ranks,
                            half = half](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    constexpr std::int64_t kWidth = 2048;
    WideModel model(kWidth);
    Config config;
    config.zero.stage = stage;
    if (half) config.precision.dtype = config.precision.parameters = config::DType::bf16;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const std::vector<at::Tensor> window{test::normal({4, kWidth}, 9).requires_grad_()};
    engine.step(window, [&](const at::Tensor& x) { return Loss(model.loss(x)); });
    const auto books = engine.ledger().snapshot();
    const auto held = [&](memory::Account account) {
      return static_cast<double>(books.current[static_cast<std::size_t>(account)]);
    };
    EXPECT_EQ(held(memory::Account::gathered), 0);
    const double p = 1.0 * WideModel::kBlocks * kWidth * kWidth;
    const auto split = [&](int first) { return stage >= first ? ranks : 1; };
    const std::array<Account, 3> formula{{
        {"parameters", memory::Account::parameters, (half ? 2 : 4) * p / split(3)},
        {"optimizer", memory::Account::optimizer, (half ? 12 : 8) * p / split(1)},
        {"gradients", memory::Account::gradients, 4 * p / split(2)},
    }};
    std::string line = join("stage ", stage, ", ranks ", ranks, half ? ", bf16" : ", fp32");
    for (const auto& [name, account, bytes] : formula) {
      EXPECT_NEAR(held(account), bytes, 0.01 * bytes) << name;
      line += join("; ", name, ' ', held(account) / 1e6, " MB, ", bytes / 1e6, " by the formula");
    }
    if (group->rank() == 0) std::cout << line << std::endl;
  });
}

TEST_P(Cost, TrafficFollowsTheFormula) {
  const auto [stage, ranks, half] = GetParam();
  constexpr int k = 3;
  testing::on_ranks(
      ranks, [&, stage = stage, ranks = ranks, half = half](std::shared_ptr<comm::Group> group) {
        at::set_num_threads(1);
        WideModel model;
        Config config;
        config.zero.stage = stage;
        if (half) config.precision.dtype = config.precision.parameters = config::DType::bf16;
        Engine engine(model.view(), config, group);
        model.bind(engine);
        const double moved = bytes_of_a_window(model, engine, k);
        const double e_g = 4, e_p = half ? 2 : 4;
        const double per_parameter = stage == 0   ? 2 * e_g
                                     : stage == 1 ? e_g + e_p
                                     : stage == 2 ? k * e_g + e_p
                                                  : k * (2 * e_p + e_g);
        const double expected =
            WideModel::kParameters * per_parameter * (ranks - 1) / static_cast<double>(ranks);
        EXPECT_NEAR(moved, expected, 0.01 * expected);
      });
}
INSTANTIATE_TEST_SUITE_P(All, Cost,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 2, 4), ::testing::Bool()),
                         [](const auto& info) {
                           return join("stage", std::get<0>(info.param), "_w",
                                       std::get<1>(info.param),
                                       std::get<2>(info.param) ? "_bf16" : "_fp32");
                         });

// Gradients of stage 2 never pile up: one flat on its way and one that fills, whatever the depth.
TEST(Cost, Stage2HoldsTwoTransientFlats) {
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    WideModel model;
    Config config;
    config.zero.stage = 2;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const auto before = engine.ledger().snapshot();
    const std::vector<at::Tensor> window{test::normal({4, WideModel::kWidth}, 9).requires_grad_()};
    engine.step(window, [&](const at::Tensor& x) { return Loss(model.loss(x)); });
    const auto after = engine.ledger().snapshot();
    constexpr auto communication = static_cast<std::size_t>(memory::Account::communication);
    const auto flat =
        static_cast<std::int64_t>(sizeof(float)) * WideModel::kWidth * WideModel::kWidth;
    EXPECT_LE(after.own_peak[communication], before.current[communication] + 2 * flat);
    EXPECT_EQ(after.current[communication], before.current[communication]);
  });
}

// Where gradients travel in bf16 their copies do not pile up either: one travels, one is made.
TEST(Cost, SixteenBitCopiesAreFew) {
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    for (const int stage : {0, 1}) {
      WideModel model;
      Config config;
      config.zero.stage = stage;
      config.zero.gradient_dtype = config::DType::bf16;
      Engine engine(model.view(), config, group);
      const auto before = engine.ledger().snapshot();
      const std::vector<at::Tensor> window{test::normal({4, WideModel::kWidth}, 9)};
      engine.step(window, [&](const at::Tensor& x) { return Loss(model.loss(x)); });
      constexpr auto communication = static_cast<std::size_t>(memory::Account::communication);
      const std::int64_t copy = 2 * WideModel::kWidth * WideModel::kWidth;
      EXPECT_LE(engine.ledger().snapshot().own_peak[communication],
                before.current[communication] + 2 * copy);
    }
  });
}

// Stage 3 holds few whole flats at once: the one in use, the next, and the one whose backward was
// asked for; so its peak lies below stage 2's, which holds all.
TEST(Cost, Stage3HasABoundedLiveSet) {
  std::array<std::int64_t, 2> peaks{};
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    for (const int stage : {2, 3}) {
      WideModel model;
      Config config;
      config.zero.stage = stage;
      Engine engine(model.view(), config, group);
      model.bind(engine);
      const std::vector<at::Tensor> window{
          test::normal({4, WideModel::kWidth}, 9).requires_grad_(),
          test::normal({4, WideModel::kWidth}, 8).requires_grad_()};
      StepResult result;
      for (int i = 0; i < 2; ++i) {
        result = engine.step(window, [&](const at::Tensor& x) { return Loss(model.loss(x)); });
      }
      if (group->rank() == 0) peaks[static_cast<std::size_t>(stage - 2)] = result.peak_bytes;
      if (stage == 2) continue;
      constexpr auto gathered = static_cast<std::size_t>(memory::Account::gathered);
      const auto flat = std::int64_t{4} * WideModel::kWidth * WideModel::kWidth;
      EXPECT_LE(engine.ledger().snapshot().own_peak[gathered], 3 * flat);
    }
  });
  EXPECT_LT(peaks[1], peaks[0]);
}

// bf16 on the wire halves e_g; the sum over ranks is still one of fp32.
TEST(Cost, GradientsMayTravelInBf16) {
  constexpr int k = 2, ranks = 2;
  testing::on_ranks(ranks, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    std::vector<at::Tensor> window;
    for (int i = 0; i < k; ++i)
      window.push_back(test::normal({4, WideModel::kWidth}, static_cast<std::uint64_t>(i)));
    std::vector<double> norms;
    for (const auto dtype : {config::DType::fp32, config::DType::bf16}) {
      WideModel model;
      Config config;
      config.zero.stage = 2;
      config.zero.gradient_dtype = dtype;
      Engine engine(model.view(), config, group);
      group->reset_traffic();
      norms.push_back(
          engine.step(window, [&](const at::Tensor& x) { return Loss(model.loss(x)); }).grad_norm);
      const auto moved = static_cast<double>(
          group->traffic().bytes[static_cast<std::size_t>(comm::Kind::reduce_scatter)]);
      const double e_g = dtype == config::DType::fp32 ? 4 : 2;
      const double expected = WideModel::kParameters * k * e_g * (ranks - 1) / ranks;
      EXPECT_NEAR(moved, expected, 0.01 * expected);
    }
    EXPECT_NE(norms[0], norms[1]);
    EXPECT_NEAR(norms[0], norms[1], 0.004 * norms[0]);  // bf16 keeps 8 bits
  });
}

// Gathered once for the window: e_p + k e_g.
TEST(Cost, KeptParametersAreGatheredOncePerWindow) {
  constexpr int k = 3, ranks = 2;
  testing::on_ranks(ranks, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    WideModel model;
    Config config;
    config.zero.stage = 3;
    config.zero.keep_gathered = config::KeepGathered::window;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const double moved = bytes_of_a_window(model, engine, k);
    const double expected = WideModel::kParameters * (4 + k * 4) * (ranks - 1) / ranks;
    EXPECT_NEAR(moved, expected, 0.01 * expected);
  });
}

}  // namespace
}  // namespace poise
