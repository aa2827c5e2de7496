// Plans of a C++ model from a sample batch, held to what an engine then really holds.
#include "poise/module_plan.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "poise/engine.h"

namespace poise {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
namespace nn = torch::nn;

constexpr std::int64_t kWidth = 64, kRows = 32;  // of a sample

struct Block : nn::Module {
  explicit Block(std::int64_t inner)
      : norm(nn::LayerNormOptions({kWidth})), up(kWidth, inner), down(inner, kWidth) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};

struct Net : nn::Module {
  // `times`: every block runs so often.
  explicit Net(int times = 1) : first(16, kWidth), head(kWidth, 16), times(times) {
    register_module("first", first);
    for (int i = 0; i < 3; ++i) blocks->push_back(std::make_shared<Block>(kWidth * (2 + i)));
    register_module("blocks", blocks);
    register_module("head", head);
  }
  Loss loss(std::int64_t samples) {
    auto x = first(at::randn({samples, kRows, 16}));
    for (int run = 0; run < times; ++run) {
      for (std::size_t i = 0; i < blocks->size(); ++i) x = blocks->ptr<Block>(i)->forward(x);
    }
    const auto out = head(x);
    return Loss::mean(at::mse_loss(out, at::zeros_like(out)), static_cast<double>(samples));
  }
  nn::Linear first;
  nn::ModuleList blocks;
  nn::Linear head;
  int times;
};

Config config_of(std::int64_t global_batch) {
  Config config;
  config.batch.global_batch_size = global_batch;
  return config;
}

std::int64_t measured(Net& net, const plan::Choice& choice, std::int64_t budget = 0) {
  Config config;
  config.batch.accumulation = choice.accumulation;
  config.memory.budget_bytes = budget;
  Engine engine(view(net), config);
  std::int64_t peak = 0;
  for (int update = 0; update < 2; ++update) {
    const auto result = engine.step(static_cast<std::size_t>(choice.accumulation),
                                    [&](std::size_t) { return net.loss(choice.micro_batch); });
    peak = std::max(peak, result.peak_bytes);
  }
  return peak;
}

plan::Answer searched(Net& net, const Config& config) {
  const auto job = plan_job(
      view(net), [&](std::int64_t n) { return net.loss(n); }, config);
  return plan::search(job);
}

TEST(ModulePlan, APlanHoldsWhatItSays) {
  for (const int times : {1, 2}) {  // blocks that run twice are one link
    Net net(times);
    const auto answer = searched(net, config_of(16));
    ASSERT_TRUE(answer.fits);
    const auto& best = answer.best;
    EXPECT_EQ(best.choice.micro_batch * best.choice.accumulation, 16);
    const auto peak = measured(net, best.choice);
    EXPECT_NEAR(static_cast<double>(peak), static_cast<double>(best.memory.peak),
                0.01 * static_cast<double>(peak))
        << times;
  }
}

// By the floor, not by the fastest plan, which is a matter of the moment.
TEST(ModulePlan, ABudgetIsKept) {
  Net net;
  auto config = config_of(16);
  const auto free = searched(net, config);
  const auto held = plan::total(free.best.memory.held);
  ASSERT_GT(free.floor, held);
  config.memory.budget_bytes = free.floor + (free.floor - held) / 2;
  const auto answer = searched(net, config);
  ASSERT_TRUE(answer.fits);
  EXPECT_LE(answer.best.memory.peak, config.memory.budget_bytes);
  EXPECT_LT(answer.best.choice.micro_batch, 16);
  EXPECT_NO_THROW(measured(net, answer.best.choice, config.memory.budget_bytes));
  config.memory.budget_bytes = free.floor - 1;
  EXPECT_FALSE(searched(net, config).fits);
}

TEST(ModulePlan, UnitsAreLinksOfTheirOwn) {
  Net net;
  const auto traced = trace(view(net), [&](std::int64_t n) { return net.loss(n); }, {}, {1, 4});
  ASSERT_EQ(traced.chains.size(), 2u);
  std::vector<std::string> names;
  for (const auto& link : traced.chains[1].links) names.push_back(link.name);
  EXPECT_THAT(names, ElementsAre("the embedding", "blocks.0", "blocks.1", "blocks.2", "the head"));
  // What a block saves: its input, the norm's output and statistics, and twice its inner width.
  for (std::int64_t i = 0; i < 3; ++i) {
    const auto& link = traced.chains[1].links[static_cast<std::size_t>(i + 1)];
    const auto rows = 4 * kRows;
    EXPECT_EQ(link.passes[0].saved, 4 * rows * (2 * kWidth + 2 + 2 * kWidth * (2 + i))) << i;
    EXPECT_EQ(link.flat, i);
    EXPECT_GT(link.flops, 0);
  }
  // Stage 3 then gathers unit by unit.
  plan::Choice choice;
  choice.ranks = 2;
  choice.stage = 3;
  choice.reduces_every = true;
  const auto chain = plan::chain(traced, 2);
  const auto gathered = [&](const plan::Choice& c) {
    return plan::memory(chain, c, plan::Widths{})
        .at_peak[static_cast<std::size_t>(memory::Account::gathered)];
  };
  const auto by_unit = gathered(choice);
  choice.keep_gathered = true;
  EXPECT_LT(by_unit, gathered(choice));
}

TEST(ModulePlan, NothingChanges) {
  Net net;
  nn::BatchNorm1d norm(nn::BatchNorm1dOptions(kRows).affine(false));
  net.register_module("statistics", norm);
  std::vector<at::Tensor> before;
  for (const auto& tensor : net.parameters()) before.push_back(tensor.detach().clone());
  const auto running = norm->running_mean.clone();
  auto generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(7);
  const auto random = generator.get_state();
  config::PrecisionPolicy half;
  half.dtype = half.parameters = config::DType::bf16;
  trace(
      view(net),
      [&](std::int64_t n) {
        norm(at::randn({n + 1, kRows, 4}));
        return net.loss(n);
      },
      half);
  const auto after = net.parameters();
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(after[i].equal(before[i])) << i;  // fp32 again, as they were
    EXPECT_FALSE(after[i].grad().defined());
  }
  EXPECT_TRUE(norm->running_mean.equal(running));
  EXPECT_TRUE(generator.get_state().equal(random));
}

TEST(ModulePlan, WhatIsMissingIsNamed) {
  Net net;
  const auto loss = [&](std::int64_t n) { return net.loss(n); };
  EXPECT_THAT([&] { plan_job(view(net), loss, Config{}); },
              ThrowsMessage<Error>(HasSubstr("needs the samples of an update")));
  EXPECT_THAT(
      [&] {
        trace(view(net), loss, {}, {2, 1});
      },
      ThrowsMessage<Error>(HasSubstr("must rise from at least 1")));
}

}  // namespace
}  // namespace poise
