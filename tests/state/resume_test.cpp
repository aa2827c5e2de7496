// A resumed run is the unbroken one, to the bit: precisions, optimizers, skipped updates, dropout.
#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "state/training.h"

namespace poise {
namespace {

using test::Part;
using testing::TempFolder;

struct Case {
  std::string precision;  // fp32; bf16, fp16: under autocast; bf16m, fp16m: with fp32 masters
  std::string optimizer;
};

Config config_of(const Case& c) {
  auto config = test::adamw_config();
  test::set_type(config.optimizer, c.optimizer);
  using config::DType;
  if (c.precision.rfind("bf16", 0) == 0) config.precision.dtype = DType::bf16;
  if (c.precision.rfind("fp16", 0) == 0) config.precision.dtype = DType::fp16;
  if (c.precision.size() == 5) config.precision.parameters = config.precision.dtype;
  // Overflows before the save and grows after it.
  config.precision.initial_loss_scale = 4194304;  // 2^22
  config.precision.loss_scale_growth_interval = 4;
  config.precision.loss_scale_hysteresis = 2;
  return config;
}

class Resume : public ::testing::TestWithParam<Case> {};

TEST_P(Resume, IsTheUnbrokenRun) {
  const TempFolder folder;
  const auto config = config_of(GetParam());
  const auto whole = test::run({.config = config, .begin = 0, .end = 14});
  for (const int at : {0, 5, 9}) {
    const auto save = folder / std::to_string(at);
    test::run({.config = config, .save = save, .begin = 0, .end = at});
    const auto rest = test::run({.config = config, .load = save, .begin = at, .end = 14});
    const std::vector<StepResult> want(whole[0].results.begin() + at, whole[0].results.end());
    EXPECT_EQ(test::first_difference(rest[0].results, want), "") << at;
    EXPECT_EQ(test::first_difference(rest[0].parameters, whole[0].parameters), "") << at;
    EXPECT_EQ(test::first_difference(rest[0].masters, whole[0].masters), "") << at;
  }
  const auto& results = whole[0].results;
  if (GetParam().precision.rfind("fp16", 0) == 0) {  // the test is about something
    EXPECT_EQ(results[0].status, Status::overflow);
    EXPECT_GT(results[4].skipped, 1);
    bool grew = false;
    for (std::size_t i = 6; i < results.size(); ++i) {
      grew = grew || results[i].loss_scale > results[i - 1].loss_scale;
    }
    EXPECT_TRUE(grew);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Grid, Resume,
    ::testing::Values(Case{"fp32", "adamw"}, Case{"fp32", "adam"}, Case{"fp32", "sgd"},
                      Case{"bf16", "adamw"}, Case{"bf16m", "adamw"}, Case{"bf16m", "sgd"},
                      Case{"bf16m", "lion"}, Case{"bf16m", "lamb"}, Case{"bf16m", "adafactor"},
                      Case{"fp32", "lars"}, Case{"fp32", "adamw_bf16"}, Case{"bf16m", "adamw_8bit"},
                      Case{"fp16", "adamw"}, Case{"fp16m", "adamw"}),
    [](const auto& info) { return info.param.precision + "_" + info.param.optimizer; });

// Dropout draws from torch's generator, and buffers are the forward's own.
struct Noisy {
  test::TinyModel model;
  at::Tensor calls = at::zeros({}, at::kLong);
  at::Tensor mean = at::zeros({test::TinyModel::kClasses}, at::kFloat);

  ModelView view() const {
    auto made = model.view();
    made.buffers = {{"calls", calls}, {"mean", mean}};
    return made;
  }
  Loss loss(const test::Batch& batch) {
    const auto logits = at::dropout(model.logits(batch.x), 0.4, true);
    calls.add_(1);
    mean.mul_(0.9).add_(logits.detach().mean(0), 0.1);
    const auto value = at::cross_entropy_loss(logits, batch.y, {}, at::Reduction::Mean, -100, 0.0);
    return Loss::mean(value, batch.counted());
  }
};

std::vector<StepResult> train(Noisy& noisy, Engine& engine, int begin, int end) {
  std::vector<StepResult> results;
  for (int update = begin; update < end; ++update) {
    std::vector<test::Batch> window;
    for (int i = 0; i < 3; ++i) {
      window.push_back(test::make_batch(4 + i, static_cast<std::uint64_t>(100 * update + i), 1));
    }
    results.push_back(engine.step(window, [&](const test::Batch& b) { return noisy.loss(b); }));
  }
  return results;
}

TEST(Resume, GoesOnWithRandomNumbersAndBuffers) {
  const TempFolder folder;
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(11);
  Noisy unbroken;
  Engine engine(unbroken.view(), test::adamw_config());
  train(unbroken, engine, 0, 4);
  engine.save(folder.path());
  const auto want = train(unbroken, engine, 4, 9);

  generator.set_current_seed(99);
  Noisy resumed;
  Engine fresh(resumed.view(), test::adamw_config());
  fresh.load(folder.path());
  EXPECT_EQ(test::first_difference(train(resumed, fresh, 4, 9), want), "");
  EXPECT_TRUE(at::equal(resumed.calls, unbroken.calls));
  EXPECT_TRUE(at::equal(resumed.mean, unbroken.mean));
  EXPECT_EQ(resumed.calls.item<std::int64_t>(), 27);
}

TEST(Resume, BringsBackWhatWasGivenAlong) {
  const TempFolder folder;
  test::TinyModel model;
  Engine engine(model.view(), test::adamw_config());
  const auto path = engine.save(
      folder.path(), {.name = "mine", .cursor = 77, .user = {{"a", "b"}}, .own = {{"c", "d"}}});
  EXPECT_EQ(path, folder / "mine");
  const auto loaded = engine.load(path);
  EXPECT_EQ(loaded.path, path);
  EXPECT_EQ(loaded.cursor, 77);
  EXPECT_EQ(loaded.user.at("a"), "b");
  EXPECT_EQ(loaded.own.at("c"), "d");
}

// An edit in place is saved, and one made before a load does not come back after it.
TEST(Resume, SavesEditsAndForgetsThemOnLoad) {
  const TempFolder folder;
  auto config = test::adamw_config();
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  test::TinyModel model;
  Engine engine(model.view(), config);
  {
    at::NoGradGuard no_grad;
    model.b1.fill_(0.5);
  }
  engine.save(folder.path());
  const auto master = engine.master("l1.weight").clone();
  {
    at::NoGradGuard no_grad;
    model.w1.fill_(3);
  }
  engine.load(folder.path());
  EXPECT_TRUE(at::equal(engine.master("l1.bias"), at::zeros({10}, at::kFloat) + 0.5));
  EXPECT_TRUE(at::equal(engine.master("l1.weight"), master));
  engine.step(std::vector{test::make_batch(4, 1)},
              [&](const test::Batch& b) { return Loss(test::mean_loss(model, b)); });
  EXPECT_LT((engine.master("l1.weight") - master).abs().max().item<double>(), 0.1);
}

TEST(Resume, AsksForAClosedWindow) {
  const TempFolder folder;
  test::TinyModel model;
  auto config = test::adamw_config();
  config.batch.accumulation = 2;
  Engine engine(model.view(), config);
  {
    const auto scope = engine.forward_scope();
    engine.backward(test::mean_loss(model, test::make_batch(4, 1)));
  }
  for (int i = 0; i < 2; ++i) {  // what is refused leaves the window open
    EXPECT_NE(testing::message_of([&] { engine.save(folder.path()); }).find("open window of 1"),
              std::string::npos);
    EXPECT_NE(testing::message_of([&] { engine.load(folder.path()); }).find("open window of 1"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace poise
