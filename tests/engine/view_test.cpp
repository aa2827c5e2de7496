// Which modules are the units: python/tests/test_engine.py builds the same structures and expects
// the same names.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "poise/engine.h"

namespace poise {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
namespace nn = torch::nn;

std::vector<std::string> units_of(const nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& unit : view(module).units) names.push_back(unit.name);
  return names;
}

struct Block : nn::Module {
  Block() { register_module("up", nn::Linear(4, 4)); }
};

struct Holder : nn::Module {
  explicit Holder(at::Tensor weight) { register_parameter("weight", std::move(weight)); }
};

struct Net : nn::Module {
  Net(bool with_blocks, bool with_stem) {
    if (with_stem) {
      register_module("stem", nn::Sequential(nn::Linear(64, 64), nn::ReLU(), nn::Linear(64, 64)));
    }
    register_module("pair", nn::Sequential(nn::Linear(2, 2), nn::Linear(2, 2)));
    if (with_blocks) {
      nn::ModuleList blocks;
      for (int i = 0; i < 3; ++i) blocks->push_back(std::make_shared<Block>());
      register_module("blocks", blocks);
    }
    register_module("head", nn::Linear(64, 64));
  }
};

TEST(View, BlocksOfOneClassComeBeforeALargerMixedList) {
  EXPECT_THAT(units_of(Net(true, true)), ElementsAre("blocks.0", "blocks.1", "blocks.2"));
  EXPECT_THAT(units_of(Net(false, true)), ElementsAre("pair.0", "pair.1"));
  EXPECT_THAT(units_of(Net(true, false)), ElementsAre("blocks.0", "blocks.1", "blocks.2"));
}

TEST(View, TheModuleItselfMayBeTheList) {
  const nn::Sequential mixed(nn::Linear(4, 4), nn::ReLU{}, nn::Linear(4, 4));
  EXPECT_THAT(units_of(*mixed), ElementsAre("0", "2"));
  const nn::ModuleList nested(nn::Linear(64, 64),
                              nn::ModuleList(nn::Linear(2, 2), nn::Linear(2, 2)));
  EXPECT_THAT(units_of(*nested), ElementsAre("1.0", "1.1"));
}

TEST(View, AModelCutDownToOneLayerHasABlock) {
  struct Short : nn::Module {
    Short() {
      register_module("stem", nn::Sequential(nn::Linear(64, 64)));
      register_module("blocks", nn::ModuleList(std::make_shared<Block>()));
    }
  };
  EXPECT_THAT(units_of(Short()), ElementsAre("blocks.0"));
}

TEST(View, ATiedParameterCountsOnce) {
  const auto weight = at::ones({8, 8});  // 64 elements, not 128
  const auto list = [](const at::Tensor& first, const at::Tensor& second) {
    return nn::ModuleList(std::make_shared<Holder>(first), std::make_shared<Holder>(second));
  };
  const nn::ModuleList root(list(weight, weight), list(at::ones({9, 9}), at::ones({1})),
                            nn::Linear(1, 1));  // mixed: the two lists inside decide
  EXPECT_THAT(units_of(*root), ElementsAre("1.0", "1.1"));
}

TEST(View, AListWithoutParametersIsNone) {
  const nn::Sequential empty(nn::ReLU{}, nn::ReLU{});
  EXPECT_THAT(units_of(*empty), IsEmpty());
  EXPECT_THAT(units_of(nn::LinearImpl(4, 4)), IsEmpty());
}

}  // namespace
}  // namespace poise
