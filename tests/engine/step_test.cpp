// The step against a float64 reference, and the promises on splits, call forms and weights.
#include <gtest/gtest.h>

#include "support/tiny_model.h"

namespace poise {
namespace {

using test::Batch;
using test::make_batch;
using test::mean_loss;
using test::Reference;
using test::TinyModel;

Config config_with(double lr = 1e-2) {
  Config config;
  config.optimizer.lr = lr;
  config.optimizer.weight_decay = 0.1;
  config.optimizer.max_grad_norm = 0.5;
  return config;
}

// Windows of ragged micro-batches: row counts and masks differ, one is masked out altogether.
std::vector<Batch> ragged_window(int update) {
  const auto seed = static_cast<std::uint64_t>(100 * update + 7);
  return {make_batch(7, seed, 2), make_batch(3, seed + 1), make_batch(4, seed + 2, 4),
          make_batch(12, seed + 3, 1)};
}

TEST(Step, EqualsFloat64ReferenceOverRaggedWindows) {
  TinyModel model;
  const auto config = config_with();
  Reference reference(model, config.optimizer);
  Engine engine(model.view(), config);
  for (int update = 0; update < 20; ++update) {
    const auto window = ragged_window(update);
    const auto result = engine.step(
        window, [&](const Batch& b) { return Loss::mean(mean_loss(model, b), b.counted()); });
    const auto expected = reference.step(window, config.optimizer.lr);
    ASSERT_EQ(result.status, Status::applied);
    EXPECT_EQ(result.tokens, 5 + 3 + 0 + 11);
    EXPECT_NEAR(result.loss, expected.loss, 2e-6 * expected.loss);
    EXPECT_NEAR(result.grad_norm, expected.norm, 5e-6 * expected.norm);
    EXPECT_NEAR(result.clipped_norm, std::min(expected.norm, 0.5), 1e-5);
  }
  EXPECT_LT(test::largest_error(model, reference), 5e-6);
  EXPECT_EQ(engine.updates(), 20);
}

TEST(Step, BigBatchAndAccumulationAgreeToRounding) {
  TinyModel whole, split;
  const auto config = config_with();
  Reference reference(whole, config.optimizer);
  Engine big(whole.view(), config), small(split.view(), config);
  for (int update = 0; update < 10; ++update) {
    const auto batch = make_batch(24, 50 + update);
    std::vector<Batch> pieces;
    for (int i = 0; i < 8; ++i)
      pieces.push_back({batch.x.narrow(0, 3 * i, 3), batch.y.narrow(0, 3 * i, 3)});
    const std::vector<Batch> one{batch};
    big.step(one, [&](const Batch& b) { return Loss::mean(mean_loss(whole, b), b.counted()); });
    small.step(pieces,
               [&](const Batch& b) { return Loss::mean(mean_loss(split, b), b.counted()); });
    reference.step(one, config.optimizer.lr);
  }
  const double of_big = test::largest_error(whole, reference);
  EXPECT_LE(test::largest_error(split, reference), 2 * of_big + 1e-7);
}

TEST(Step, ThreeCallsGiveTheBitsOfTheWindow) {
  TinyModel by_window, by_calls;
  auto config = config_with();
  config.batch.accumulation = 4;
  Engine window_engine(by_window.view(), config), calls_engine(by_calls.view(), config);
  for (int update = 0; update < 5; ++update) {
    const auto window = ragged_window(update);
    const auto a = window_engine.step(
        window, [&](const Batch& b) { return Loss::mean(mean_loss(by_window, b), b.counted()); });
    for (const auto& b : window) {
      EXPECT_FALSE(calls_engine.is_boundary());
      at::Tensor loss;
      {
        auto scope = calls_engine.forward_scope();
        loss = mean_loss(by_calls, b);
      }
      calls_engine.backward(Loss::mean(loss, b.counted()));
    }
    EXPECT_TRUE(calls_engine.is_boundary());
    const auto b = calls_engine.step();
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
  }
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(by_window.named()[i].tensor.equal(by_calls.named()[i].tensor));
}

TEST(Step, MeanSumAndPerTokenLossesAreTheSameLoss) {
  const auto train = [&](auto make_loss) {
    TinyModel model;
    Engine engine(model.view(), config_with());
    double loss = 0;
    for (int update = 0; update < 3; ++update) {
      const std::vector<Batch> window{make_batch(5, update), make_batch(9, update + 40)};
      loss = engine.step(window, [&](const Batch& b) { return make_loss(model, b); }).loss;
    }
    return std::pair(loss, model.w1.detach().clone());
  };
  const auto reduced = [](const TinyModel& m, const Batch& b, std::int64_t reduction) {
    return at::cross_entropy_loss(m.logits(b.x), b.y, {}, reduction, -100, 0.0);
  };
  const auto mean = train([&](auto& m, auto& b) {
    return Loss::mean(reduced(m, b, at::Reduction::Mean), b.counted());
  });
  const auto sum = train(
      [&](auto& m, auto& b) { return Loss::sum(reduced(m, b, at::Reduction::Sum), b.counted()); });
  const auto each =
      train([&](auto& m, auto& b) { return Loss::per_token(reduced(m, b, at::Reduction::None)); });
  EXPECT_NEAR(mean.first, sum.first, 1e-6);
  EXPECT_NEAR(mean.first, each.first, 1e-6);
  EXPECT_TRUE(mean.second.allclose(sum.second, 1e-5, 1e-6));
  EXPECT_TRUE(mean.second.allclose(each.second, 1e-5, 1e-6));
}

// L = mean over rows + 0.3 x mean over sequences of another count; the reference is one big batch.
TEST(Step, TermsWithDenominatorsOfTheirOwn) {
  const auto term = [](const TinyModel& m, const Batch& b, std::int64_t rows) {
    return m.logits(b.x.narrow(0, 0, rows)).pow(2).mean();
  };
  const Batch a = make_batch(6, 1), b = make_batch(10, 2);
  auto config = config_with();
  config.optimizer.max_grad_norm = 0;
  TinyModel model, plain;
  Engine engine(model.view(), config);
  const std::vector<Batch> window{a, b};
  const std::int64_t rows[] = {2, 5};
  const auto result =
      engine.step(2,
                  [&](std::size_t i) {
                    auto loss = Loss::mean(mean_loss(model, window[i]), window[i].counted());
                    loss.terms.push_back({term(model, window[i], rows[i]), Loss::Kind::mean,
                                          at::scalar_tensor(rows[i]), 0.3});
                    return loss;
                  },
                  {16, 7});
  // By hand: each mean weighted by its count over the total of its own kind.
  const auto total = (mean_loss(plain, a) * 6 + mean_loss(plain, b) * 10) / 16 +
                     0.3 * (term(plain, a, 2) * 2 + term(plain, b, 5) * 5) / 7;
  torch::autograd::backward({total}, {});
  double squares = 0;
  for (const auto& p : plain.named())
    squares += p.tensor.grad().to(at::kDouble).pow(2).sum().item<double>();
  EXPECT_NEAR(result.loss, total.item<double>(), 1e-6);
  EXPECT_NEAR(result.grad_norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
  const auto loss_with_term = [&](std::size_t i) {
    auto loss = Loss::mean(mean_loss(model, window[i]), 6);
    loss.terms.push_back({term(model, window[i], 2), Loss::Kind::mean, at::scalar_tensor(2), 1});
    return loss;
  };
  EXPECT_THROW(engine.step(1, loss_with_term), Error) << "terms without counts";
  EXPECT_THROW(engine.step(1, loss_with_term, {16, 7}), Error)
      << "counts that the window does not reach";
}

TEST(Step, ReadingGradientsChangesNoBitAndWritingThemCounts) {
  const auto batch = make_batch(8, 3);
  const auto run = [&](int mode) {
    TinyModel model;
    auto config = config_with();
    Engine engine(model.view(), config);
    at::Tensor loss;
    {
      auto scope = engine.forward_scope();
      loss = mean_loss(model, batch);
    }
    engine.backward(Loss::mean(loss, 8));
    engine.begin_update();
    if (mode > 0) {
      const auto gradient = engine.gradient("l1.weight");
      TinyModel plain;
      torch::autograd::backward({mean_loss(plain, batch)}, {});
      EXPECT_TRUE(gradient.allclose(plain.w1.grad(), 1e-5, 1e-7));
      if (mode == 2) gradient.zero_();
    }
    const auto norm = engine.step().grad_norm;
    return std::pair(norm, model.w1.detach().clone());
  };
  const auto untouched = run(0), read = run(1), written = run(2);
  EXPECT_EQ(untouched.first, read.first);
  EXPECT_TRUE(untouched.second.equal(read.second));
  EXPECT_LT(written.first, untouched.first);
  TinyModel start;
  EXPECT_TRUE(written.second.allclose(start.w1 * (1 - 1e-2 * 0.1), 0, 1e-7))
      << "only decay moved it";
}

// A ramp closes windows at the count of the update, a rate that follows the batch follows it, and a
// run that begins at any update is in the middle of it.
TEST(Step, WindowsAndRatesFollowTheRamp) {
  TinyModel model;
  auto config = config_with();
  config.batch.micro_batch_size = 4;
  config.batch.accumulation = 4;
  config.batch.ramp_from = 1;
  config.batch.ramp_updates = 6;
  config.optimizer.lr_scaling = "linear";
  config.optimizer.lr_batch_size = 16;
  Engine engine(model.view(), config);
  const std::int64_t want[] = {1, 1, 2, 2, 3, 3, 4, 4};
  for (const auto micro_batches : want) {
    EXPECT_EQ(engine.accumulation(), micro_batches);
    EXPECT_DOUBLE_EQ(engine.learning_rate(), 1e-2 * static_cast<double>(micro_batches) / 4);
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      EXPECT_FALSE(engine.is_boundary());
      engine.backward(Loss::mean(mean_loss(model, make_batch(4, 1)), 4));
    }
    EXPECT_TRUE(engine.is_boundary());
    const auto result = engine.step();
    EXPECT_EQ(result.micro_batches, micro_batches);
    EXPECT_DOUBLE_EQ(result.lr, 1e-2 * static_cast<double>(micro_batches) / 4);
  }
  engine.set_updates(3);
  EXPECT_EQ(engine.accumulation(), 2);
  engine.set_accumulation(7);
  EXPECT_EQ(engine.accumulation(), 7);
}

TEST(Step, RefusesCallsOutOfOrder) {
  TinyModel model;
  auto config = config_with();
  config.batch.accumulation = 2;
  Engine engine(model.view(), config);
  const auto batch = make_batch(4, 1);
  EXPECT_THROW(engine.step(), Error);
  EXPECT_THROW(engine.begin_update(), Error);
  EXPECT_THROW(engine.gradient("l1.weight"), Error);
  EXPECT_THROW(engine.step(0, [](std::size_t) { return Loss(); }), Error);
  engine.backward(Loss::mean(mean_loss(model, batch), 4));
  EXPECT_THROW(engine.step(), Error) << "off the boundary";
  EXPECT_THROW(
      engine.step(std::vector<Batch>{batch}, [&](const Batch& b) { return mean_loss(model, b); }),
      Error);
  const auto result = engine.step(Last::yes);
  EXPECT_EQ(result.status, Status::applied);
  EXPECT_EQ(result.micro_batches, 1);
}

TEST(Step, UserEditsReachTheMasters) {
  TinyModel model;
  auto config = config_with(0.0);
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  Engine engine(model.view(), config);
  {
    at::NoGradGuard no_grad;
    model.w1.fill_(0.25);
  }
  const std::vector<Batch> window{make_batch(4, 1)};
  engine.step(window, [&](const Batch& b) { return Loss::mean(mean_loss(model, b), 4); });
  EXPECT_TRUE(model.w1.eq(0.25).all().item<bool>());
  EXPECT_TRUE(engine.master("l1.weight").eq(0.25).all().item<bool>());
}

}  // namespace
}  // namespace poise
