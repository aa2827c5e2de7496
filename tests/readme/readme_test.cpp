// The C++ blocks of the README compile and do what is said beside them: CMakeLists.txt takes them
// out.
#include <gtest/gtest.h>
#include <poise/poise.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace poise {
namespace {

static_assert(POISE_README_BLOCKS == 2, "a test for every C++ block of the README");

struct Batch {
  at::Tensor input;
  at::Tensor target;
  std::int64_t tokens = 0;
};

struct BlockModule : torch::nn::Module {
  BlockModule() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) { return x + torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
  zero::Unit unit;
};

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 2; ++i) blocks->push_back(std::make_shared<BlockModule>());
    register_module("blocks", blocks);
  }
  at::Tensor loss(const Batch& batch) {
    auto x = batch.input;
    for (const auto& one : *blocks) x = std::dynamic_pointer_cast<BlockModule>(one)->forward(x);
    return torch::nn::functional::mse_loss(x, batch.target);
  }
  torch::nn::ModuleList blocks;
};

Batch batch_of(std::int64_t rows) { return {at::ones({rows, 4}), at::zeros({rows, 4}), rows}; }

TEST(Readme, ALoopOfOnesOwn) {
  const auto model = std::make_shared<Model>();
  const auto before = model->loss(batch_of(4)).item<double>();
  const std::vector<std::vector<Batch>> windows(
      20, {batch_of(3), batch_of(5), batch_of(1), batch_of(2)});
#include "readme_block_0.inc"
  EXPECT_EQ(engine.updates(), 20);
  EXPECT_LT(model->loss(batch_of(4)).item<double>(), before);
}

TEST(Readme, BlocksThatAreUnits) {
  const auto model = std::make_shared<Model>();
  Config config;
  auto block = std::dynamic_pointer_cast<BlockModule>(model->blocks->ptr(0));
  auto x = at::ones({2, 4});
  const auto expected = block->forward(x).detach();
#include "readme_block_1.inc"
  EXPECT_TRUE(x.detach().equal(expected));
}

}  // namespace
}  // namespace poise
