// Losses and gradients of odd kinds, and calls that a loss must not make: all against plain torch,
// or against the same window without them.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "poise/log.h"
#include "support/temp_folder.h"
#include "support/tiny_model.h"

namespace poise {
namespace {

using test::make_batch;
using test::mean_loss;
using test::TinyModel;
using ::testing::HasSubstr;
using testing::message_of;

Config sgd() {
  Config config;
  config.optimizer.type = "sgd";
  config.optimizer.lr = 0.1;
  config.optimizer.max_grad_norm = 0;
  return config;
}

TEST(OddLosses, ALossLeavesItsWindowAlone) {
  const auto batch = make_batch(4, 1);
  using Call = void (*)(Engine&, const Loss&);
  const Call calls[] = {[](Engine& engine, const Loss&) { engine.discard_window(); },
                        [](Engine& engine, const Loss&) { engine.begin_update(); },
                        [](Engine& engine, const Loss&) { engine.clip_grad_norm(1); },
                        [](Engine& engine, const Loss&) { engine.lose_window("it wants to"); },
                        [](Engine& engine, const Loss& loss) { engine.backward(loss); }};
  for (const auto& call : calls) {
    TinyModel model, plain;
    auto config = sgd();
    config.batch.accumulation = 4;
    Engine engine(model.view(), config), other(plain.view(), config);
    const auto run = [&](Engine& one, const TinyModel& of) {
      return one.step(3, [&](std::size_t) { return Loss::mean(mean_loss(of, batch), 4); });
    };
    run(engine, model);
    run(other, plain);
    EXPECT_THAT(message_of([&] {
                  engine.step(3, [&](std::size_t i) {
                    if (i == 1) call(engine, Loss::mean(mean_loss(model, batch), 4));
                    return Loss::mean(mean_loss(model, batch), 4);
                  });
                }),
                HasSubstr("the loss of micro-batch 2 of step(window) ended that window"));
    EXPECT_TRUE(model.w1.equal(plain.w1));
    EXPECT_EQ(run(engine, model).grad_norm, run(other, plain).grad_norm);
    EXPECT_TRUE(model.w1.equal(plain.w1));
  }
}

}  // namespace
}  // namespace poise
