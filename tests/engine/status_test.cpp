// Every outcome of a window: what is skipped, what changes, what the loss scale does.
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "support/tiny_model.h"

namespace poise {
namespace {

using test::Batch;
using test::make_batch;
using test::mean_loss;
using test::TinyModel;

std::vector<at::Tensor> copies(const TinyModel& model) {
  std::vector<at::Tensor> all;
  for (const auto& named : model.named()) all.push_back(named.tensor.detach().clone());
  return all;
}

bool same(const TinyModel& model, const std::vector<at::Tensor>& before) {
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (!model.named()[i].tensor.equal(before[i])) return false;
  }
  return true;
}

StepResult step_times(Engine& engine, TinyModel& model, double factor) {
  const std::vector<Batch> window{make_batch(4, 1)};
  return engine.step(window,
                     [&](const Batch& b) { return Loss::mean(mean_loss(model, b) * factor, 4); });
}

TEST(Status, NonFiniteLossChangesNothing) {
  TinyModel model;
  Engine engine(model.view(), Config{});
  const auto before = copies(model);
  const auto result = step_times(engine, model, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(result.status, Status::nonfinite_loss);
  EXPECT_TRUE(same(model, before));
  EXPECT_EQ(engine.updates(), 0);
  EXPECT_EQ(engine.skipped_updates(), 1);
  EXPECT_EQ(step_times(engine, model, 1).status, Status::applied);
}

// A finite loss whose gradient is not: sqrt at 0.
TEST(Status, NonFiniteGradientNamesTheParameter) {
  TinyModel model;
  Config config;
  Engine engine(model.view(), config);
  const auto before = copies(model);
  const auto bad = [&](std::size_t) {
    return Loss::mean((model.b2 * 0).abs().sqrt().sum() + model.w1.sum(), 1);
  };
  const auto result = engine.step(1, bad);
  EXPECT_EQ(result.status, Status::nonfinite_gradient);
  EXPECT_EQ(result.first_bad_parameter, "l2.bias");
  EXPECT_TRUE(same(model, before));
  config.engine.on_nonfinite = config::NonFinite::stop;
  TinyModel other;
  Engine stopping(other.view(), config);
  try {
    stopping.step(1, [&](std::size_t) { return Loss::mean((other.b2 * 0).abs().sqrt().sum(), 1); });
    FAIL() << "did not stop";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("l2.bias"), std::string::npos) << error.what();
  }
}

TEST(Status, NothingCountedIsEmptyAndKeepsTheSchedule) {
  TinyModel model;
  Engine engine(model.view(), Config{});
  const auto before = copies(model);
  const std::vector<Batch> window{make_batch(3, 1, 3), make_batch(2, 2, 2)};
  const auto result = engine.step(
      window, [&](const Batch& b) { return Loss::mean(mean_loss(model, b), b.counted()); });
  EXPECT_EQ(result.status, Status::empty);
  EXPECT_EQ(result.tokens, 0);
  EXPECT_TRUE(same(model, before));
  EXPECT_EQ(engine.updates(), 0);
}

// Growth after exactly growth_interval clean updates, backoff at exactly the overflowing one.
TEST(Status, LossScaleGrowsAndShrinksAtTheExactUpdate) {
  for (const auto parameters : {config::DType::fp16, config::DType::fp32}) {
    TinyModel model;
    Config config;
    config.precision.dtype = config::DType::fp16;
    config.precision.parameters = parameters;
    config.precision.initial_loss_scale = 1024;
    config.precision.loss_scale_growth_interval = 3;
    Engine engine(model.view(), config);
    std::vector<double> scales;
    for (int i = 0; i < 4; ++i) scales.push_back(step_times(engine, model, 1).loss_scale);
    EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 1024, 2048}));
    const auto before = copies(model);
    const auto overflow = step_times(engine, model, 60000);  // fp16 ends at 65504
    EXPECT_EQ(overflow.status, Status::overflow);
    EXPECT_EQ(overflow.loss_scale, 2048);
    EXPECT_TRUE(same(model, before));
    EXPECT_EQ(engine.loss_scale(), 1024);
    EXPECT_EQ(engine.updates(), 4);
    EXPECT_EQ(step_times(engine, model, 1).status, Status::applied);
  }
}

struct Odd : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(Status, AnExceptionKeepsItsTypeAndDiscardsTheWindow) {
  TinyModel model, undisturbed;
  Engine engine(model.view(), Config{}), other(undisturbed.view(), Config{});
  const std::vector<Batch> window{make_batch(4, 1), make_batch(4, 2)};
  EXPECT_THROW(engine.step(2,
                           [&](std::size_t i) -> Loss {
                             if (i == 1) throw Odd("user code");
                             return Loss::mean(mean_loss(model, window[i]), 4);
                           }),
               Odd);
  EXPECT_EQ(engine.micro_batches(), 0);
  const auto run = [&](Engine& e, TinyModel& m) {
    return e.step(window, [&](const Batch& b) { return Loss::mean(mean_loss(m, b), 4); });
  };
  EXPECT_EQ(run(engine, model).grad_norm, run(other, undisturbed).grad_norm);
  EXPECT_TRUE(same(model, copies(undisturbed)));
}

TEST(Status, AChangeOfRequiresGradWithinAWindowIsAnErrorAndDropsIt) {
  TinyModel model, plain;
  Config config;
  config.batch.accumulation = 2;
  Engine engine(model.view(), config);
  const auto before = copies(model);
  const auto batch = make_batch(4, 1);
  const auto backward = [&] {
    const auto scope = engine.forward_scope();
    engine.backward(Loss::mean(mean_loss(model, batch), 4));
  };
  for (const bool frozen : {true, false}) {
    for (const bool at_step : {false, true}) {
      model.w1.requires_grad_(frozen);
      backward();
      if (at_step) backward();
      model.w1.requires_grad_(!frozen);
      EXPECT_THROW(at_step ? static_cast<void>(engine.step()) : backward(), Error);
      EXPECT_EQ(engine.micro_batches(), 0);
      EXPECT_TRUE(same(model, before));
    }
  }
  model.w1.requires_grad_(false);  // and the window that comes follows it
  backward();
  backward();
  plain.w1.requires_grad_(false);
  torch::autograd::backward({mean_loss(plain, batch)}, {});
  double squares = 0;
  for (const auto& p : {plain.b1, plain.w2, plain.b2}) {
    squares += p.grad().pow(2).sum().item<double>();
  }
  EXPECT_NEAR(engine.step().grad_norm, std::sqrt(squares), 1e-5);
  EXPECT_TRUE(model.w1.equal(before[0]));
}

TEST(Status, BadLossesAreErrors) {
  TinyModel model;
  Engine engine(model.view(), Config{});
  const auto batch = make_batch(4, 1);
  const auto with = [&](Loss loss) { return engine.step(1, [&](std::size_t) { return loss; }); };
  EXPECT_THROW(with(Loss()), Error);
  EXPECT_THROW(with(Loss(model.logits(batch.x))), Error) << "not a scalar";
  EXPECT_THROW(with(Loss(mean_loss(model, batch).detach())), Error) << "no gradient";
  EXPECT_THROW(with(Loss(batch.y.sum())), Error) << "integers";
  EXPECT_THROW(with(Loss::mean(mean_loss(model, batch), -1)), Error) << "negative count";
  Loss sum(mean_loss(model, batch));
  sum.kind = Loss::Kind::sum;
  EXPECT_THROW(with(sum), Error) << "a sum without count";
  EXPECT_EQ(engine.updates(), 0);
}

}  // namespace
}  // namespace poise
