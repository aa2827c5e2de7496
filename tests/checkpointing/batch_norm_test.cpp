// Regions with torch::nn batch norms: the same bits as without recompute, and running statistics
// that move once an update.
#include <gtest/gtest.h>

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "poise/checkpointing.h"

namespace poise::checkpointing {
namespace {

constexpr std::int64_t kRows = 6, kWidth = 8;

// x + linear(gelu(norm(linear(x)))).
struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up{kWidth, 2 * kWidth}, down{2 * kWidth, kWidth};
  torch::nn::BatchNorm1d norm{2 * kWidth};

  BlockImpl() {
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(norm(up(x)))); }
};
TORCH_MODULE(Block);

enum class Region { none, each_block, all_in_one };
enum class Buffers { given, forgotten };

struct Net {
  std::vector<Block> blocks;

  Net() {
    at::manual_seed(5);
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
  }
  at::Tensor forward(at::Tensor x, Region region, Buffers buffers) {
    if (region == Region::all_in_one) {
      auto whole = [this](const at::Tensor& in) {
        return forward(in, Region::each_block, Buffers::given);
      };
      return recompute(whole, x, {.buffers = all_buffers()});
    }
    for (auto& block : blocks) {
      Options options;
      if (buffers == Buffers::given) options.buffers = block->buffers();
      const auto run = [block = block.ptr()](const at::Tensor& in) { return block->forward(in); };
      x = region == Region::none ? run(x) : recompute(run, x, options);
    }
    return x;
  }
  Tensors all_buffers() const {
    Tensors all;
    for (const auto& block : blocks) {
      for (const auto& buffer : block->buffers()) all.push_back(buffer);
    }
    return all;
  }
};

// Output, every gradient and every buffer after `updates` forwards and backwards.
Tensors trained(Region region, Buffers buffers = Buffers::given, int updates = 2) {
  Net net;
  Tensors results;
  for (int update = 0; update < updates; ++update) {
    auto x = at::randn({kRows, kWidth}).requires_grad_(true);
    const auto y = net.forward(x, region, buffers);
    y.pow(2).sum().backward();
    results.push_back(y.detach());
    results.push_back(x.grad());
  }
  for (const auto& block : net.blocks) {
    for (const auto& parameter : block->parameters()) results.push_back(parameter.grad());
  }
  for (const auto& buffer : net.all_buffers()) results.push_back(buffer);
  return results;
}

void expect_same_bits(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i;
  }
}

TEST(BatchNorm, GradientsAndStatisticsHaveTheSameBits) {
  const auto expected = trained(Region::none);
  expect_same_bits(trained(Region::each_block), expected);
  expect_same_bits(trained(Region::all_in_one), expected);
}

// The statistics against their definition, from the batch alone.
TEST(BatchNorm, StatisticsMoveOnce) {
  Net net;
  const auto x = at::randn({kRows, kWidth}).requires_grad_(true);
  net.forward(x, Region::each_block, Buffers::given).sum().backward();
  auto& first = net.blocks[0];
  const auto seen = first->up(x).detach();
  EXPECT_EQ(first->norm->num_batches_tracked.item<std::int64_t>(), 1);
  EXPECT_TRUE(first->norm->running_mean.allclose(0.1 * seen.mean(0), 1e-5, 1e-6));
  EXPECT_TRUE(
      first->norm->running_var.allclose(0.9 + 0.1 * seen.var(0, /*unbiased=*/true), 1e-5, 1e-6));
}

// What Options::buffers is for; it also shows that the tests above can fail.
TEST(BatchNorm, BuffersThatWereNotGivenMoveTwice) {
  Net net;
  const auto x = at::randn({kRows, kWidth}).requires_grad_(true);
  net.forward(x, Region::each_block, Buffers::forgotten).sum().backward();
  EXPECT_EQ(net.blocks[0]->norm->num_batches_tracked.item<std::int64_t>(), 2);
}

// In evaluation the statistics are read, and backward needs them as they are.
TEST(BatchNorm, EvaluationReadsTheStatistics) {
  const auto gradient = [](Region region) {
    Net net;
    auto x = at::randn({kRows, kWidth}).requires_grad_(true);
    net.forward(x, Region::none, Buffers::given);
    for (auto& block : net.blocks) block->eval();
    net.forward(x, region, Buffers::given).pow(2).sum().backward();
    return x.grad();
  };
  expect_same_bits({gradient(Region::each_block)}, {gradient(Region::none)});
}

}  // namespace
}  // namespace poise::checkpointing
