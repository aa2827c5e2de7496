// The engine's books: accounts by hand, a flat peak over many micro-batches, running out and going
// on.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "support/tiny_model.h"

namespace poise {
namespace {

using memory::Account;
using test::Batch;
using test::make_batch;
using test::mean_loss;
using test::TinyModel;

std::int64_t held(const Engine& engine, Account account) {
  return engine.ledger().snapshot().current[static_cast<std::size_t>(account)];
}

// Each of l1 (60 + 10 elements) and l2 (50 + 5) takes two places of 256: 1,024 elements in all.
TEST(Memory, AccountsAreRightToTheByte) {
  TinyModel model;
  Config config;
  {
    Engine engine(model.view(), config);
    EXPECT_EQ(held(engine, Account::parameters), 1024 * 4);
    EXPECT_EQ(held(engine, Account::optimizer), 2 * 1024 * 4)
        << "two moments; fp32 is its own master";
    EXPECT_EQ(held(engine, Account::gradients), 1024 * 4);
  }
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  Engine engine(model.view(), config);
  EXPECT_EQ(held(engine, Account::parameters), 1024 * 2);
  EXPECT_EQ(held(engine, Account::optimizer), 3 * 1024 * 4) << "master and two moments";
  EXPECT_EQ(held(engine, Account::gradients), 1024 * 4);
}

TEST(Memory, PeakDoesNotGrowWithTheWindow) {
  const auto peak = [](int micro_batches) {
    TinyModel model;
    Engine engine(model.view(), Config{});
    std::vector<Batch> window;
    for (int i = 0; i < micro_batches; ++i) window.push_back(make_batch(64, 5));
    std::int64_t bytes = 0;
    for (int update = 0; update < 2; ++update) {
      bytes =
          engine.step(window, [&](const Batch& b) { return Loss::mean(mean_loss(model, b), 64); })
              .peak_bytes;
    }
    return bytes;
  };
  EXPECT_EQ(peak(1), peak(32));
}

TEST(Memory, OutOfMemoryLeavesNothingBehindAndTheEngineUsable) {
  TinyModel model, undisturbed;
  Config config;
  Engine plain(undisturbed.view(), config);
  const std::vector<Batch> window{make_batch(4, 1)};
  const auto loss_of = [](TinyModel& m) {
    return [&m](const Batch& b) { return Loss::mean(mean_loss(m, b), b.counted()); };
  };
  const auto needed = plain.step(window, loss_of(undisturbed)).peak_bytes;
  config.memory.budget_bytes = needed + 1024;
  Engine engine(model.view(), config);
  const auto before = held(engine, Account::activations);
  const std::vector<Batch> large{make_batch(400, 2)};
  EXPECT_THROW(engine.step(large, loss_of(model)), c10::OutOfMemoryError);
  EXPECT_EQ(held(engine, Account::activations), before);
  const auto result = engine.step(window, loss_of(model));
  EXPECT_EQ(result.status, Status::applied);
  EXPECT_TRUE(model.w1.equal(undisturbed.w1)) << "the failed window left no trace";
}

TEST(Memory, AccountsAtThePeakSumToIt) {
  TinyModel model;
  Engine engine(model.view(), Config{});
  const std::vector<Batch> window{make_batch(64, 1)};
  const auto result =
      engine.step(window, [&](const Batch& b) { return Loss::mean(mean_loss(model, b), 64); });
  std::int64_t sum = 0;
  for (const auto bytes : result.accounts) sum += bytes;
  EXPECT_EQ(sum, result.peak_bytes);
  EXPECT_GT(result.accounts[static_cast<std::size_t>(Account::activations)], 0);
}

}  // namespace
}  // namespace poise
