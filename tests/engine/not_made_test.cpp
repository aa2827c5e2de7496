// An engine that cannot be made: the model is what it was.
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/ranks.h"
#include "support/temp_folder.h"
#include "support/tiny_model.h"

namespace poise {
namespace {

using test::TinyModel;
using ::testing::AllOf;
using ::testing::HasSubstr;

// TinyModel, a frozen weight in fp32 that 16 bits do not hold, one of integers, and a buffer.
struct Model : TinyModel {
  at::Tensor frozen = test::normal({5, 3}, 7);
  at::Tensor table = at::arange(9) + (std::int64_t{1} << 40);
  at::Tensor low = test::normal({4}, 8).to(at::kBFloat16).requires_grad_();
  at::Tensor wide = test::normal({3}, 9).to(at::kDouble).div(3).requires_grad_();
  at::Tensor mean = test::normal({2}, 10);

  std::vector<at::Tensor> tensors() const {
    return {w1, b1, w2, b2, frozen, table, low, wide, mean};
  }
  ModelView view() const {
    auto view = TinyModel::view();
    view.parameters.insert(view.parameters.end(),
                           {{"frozen", frozen}, {"table", table}, {"low", low}, {"wide", wide}});
    view.buffers = {{"mean", mean}};
    return view;
  }
};

void expect_untouched(const Model& model) {
  const Model fresh;
  const auto got = model.tensors(), want = fresh.tensors();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), want[i].scalar_type()) << i;
    EXPECT_EQ(got[i].strides(), want[i].strides()) << i;
    EXPECT_EQ(got[i].requires_grad(), want[i].requires_grad()) << i;
    EXPECT_TRUE(got[i].equal(want[i])) << i;
  }
}

std::vector<Config> configs(const std::string& folder) {
  Config plain, low, offloaded, file;
  low.precision.dtype = low.precision.parameters = config::DType::bf16;
  offloaded = low;
  offloaded.offload.parameters = config::Offload::host;
  file = low;
  file.offload.parameters = file.offload.optimizer = config::Offload::file;
  file.offload.directory = folder;
  return {plain, low, offloaded, file};
}

TEST(NotMade, WhereverItRunsOutOfMemoryTheModelIsWhatItWas) {
  const testing::TempFolder folder;
  for (auto& config : configs(folder.path())) {
    std::int64_t peak = 0;
    {
      Model model;
      peak = Engine(model.view(), config).ledger().snapshot().peak_bytes;
    }
    int failed = 0;
    Model model;
    for (std::int64_t budget = 64; budget < peak; budget += 256) {
      config.memory.budget_bytes = budget;
      EXPECT_THROW(Engine(model.view(), config), c10::OutOfMemoryError) << budget << " of " << peak;
      expect_untouched(model);
      ++failed;
    }
    EXPECT_GT(failed, 20);
    config.memory.budget_bytes = 0;
    Engine engine(model.view(), config);  // and it may become one's after all
    if (config.offload.parameters != config::Offload::none) continue;
    const auto batch = test::make_batch(4, 1);
    const auto result = engine.step(1, [&](std::size_t) {
      return Loss::mean(at::cross_entropy_loss(model.logits(batch.x).to(at::kFloat), batch.y), 4);
    });
    EXPECT_EQ(result.status, Status::applied);
  }
}

TEST(NotMade, SettingsThatFitNoParameterMoveNothing) {
  Model model;
  Config config = configs("").at(1);
  config.optimizer.groups = {{"no such name", 1.0, 0.0}};
  EXPECT_THROW(Engine(model.view(), config), Error);
  expect_untouched(model);
}

TEST(NotMade, ThatIsTakenBackLeavesWhatWas) {
  const testing::TempFolder folder;
  for (const auto& config : configs(folder.path())) {
    Model model;
    Engine engine(model.view(), config);
    engine.unmake();
    expect_untouched(model);
  }
}

// Each rank had its shard of the first unit when the second one could not be filled.
TEST(NotMade, WhatNoRankHadWholeSaysThatItIsLost) {
  std::vector<std::string> said(2);
  const auto errors = testing::errors_on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    TinyModel model;
    Config config;
    config.zero.stage = 3;
    config.zero.persistence_threshold = 0;
    int units = 0;
    const auto fill = [&](const std::string&) {
      if (++units == 2) throw Error("[test] no second unit");
    };
    const int rank = group->rank();
    try {
      Engine(model.view(), config, group, fill);
    } catch (const Error&) {
      try {
        model.w1.sum().item<float>();
      } catch (const std::exception& error) {
        said[static_cast<std::size_t>(rank)] = error.what();
      }
      throw;
    }
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("no second unit"));
  for (const auto& one : said) {
    EXPECT_THAT(
        one, AllOf(HasSubstr("'l1.weight' has lost its values"), HasSubstr("make the model anew")));
  }
}

}  // namespace
}  // namespace poise
