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

TEST(OddLosses, ACountMayHaveOneElementInAnyShape) {
  TinyModel model, plain;
  Engine engine(model.view(), sgd()), other(plain.view(), sgd());
  const auto batch = make_batch(4, 1);
  for (const auto& count : {at::full({1}, 4.0), at::full({1, 1}, 4, at::kLong),
                            (at::ones({}).requires_grad_() * 4).reshape({1})}) {
    for (const bool sum : {false, true}) {
      const auto got = engine.step(1, [&](std::size_t) {
        const auto loss = mean_loss(model, batch);
        return sum ? Loss::sum(loss * 4, count) : Loss::mean(loss, count);
      });
      const auto want =
          other.step(1, [&](std::size_t) { return Loss::mean(mean_loss(plain, batch), 4); });
      EXPECT_EQ(got.tokens, 4);
      EXPECT_FLOAT_EQ(got.loss, want.loss);
      EXPECT_FLOAT_EQ(got.grad_norm, want.grad_norm);
    }
  }
}

// Thrice 0.1 is not 0.3 to a computer.
TEST(OddLosses, CountsOfTermsNeedNotBeWhole) {
  TinyModel model;
  Engine engine(model.view(), sgd());
  const auto batch = make_batch(4, 1);
  const auto loss = [&](std::size_t) {
    auto both = Loss::mean(mean_loss(model, batch), 0.1);
    both.terms.push_back(
        {model.logits(batch.x).pow(2).mean(), Loss::Kind::mean, at::full({}, 0.1, at::kDouble)});
    return both;
  };
  EXPECT_EQ(engine.step(3, loss, {0.3, 0.3}).status, Status::applied);
  EXPECT_THAT(message_of([&] {
                engine.step(3, loss, {0.3, 0.300001});
              }),
              HasSubstr("announced with 0.300001 tokens for term 1"));
}

TEST(OddLosses, CountsAreCheckedWhateverTheWeighting) {
  for (const auto weighting :
       {config::LossWeighting::tokens, config::LossWeighting::micro_batch_mean}) {
    TinyModel model;
    auto config = sgd();
    config.engine.loss_weighting = weighting;
    Engine engine(model.view(), config);
    for (const double count : {-3.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_THAT(message_of([&] {
                    engine.step(1, [&](std::size_t) {
                      return Loss::mean(mean_loss(model, make_batch(4, 1)), count);
                    });
                  }),
                  HasSubstr("the loss's count is "));
    }
  }
}

// The weights of an fp16 run are those of its first micro-batch that counts: of one that counts
// nothing they would be far too large, and updates be skipped until the scale had come down.
TEST(OddLosses, AFirstMicroBatchThatCountsNothingSetsNoWeights) {
  const auto batch = make_batch(4, 1);
  for (const std::size_t empty : {std::size_t{1}, std::size_t{2}}) {  // micro-batches of it
    TinyModel model;
    auto config = sgd();
    config.precision.dtype = config::DType::fp16;
    Engine engine(model.view(), config);
    for (int update = 0; update < 3; ++update) {
      const auto result = engine.step(2, [&](std::size_t i) {
        return Loss::mean(mean_loss(model, batch), update == 0 && i < empty ? 0 : 1 << 20);
      });
      EXPECT_EQ(result.status, update == 0 && empty == 2 ? Status::empty : Status::applied);
      EXPECT_EQ(result.loss_scale, 65536);
    }
  }
}

// Whose window is gone, or another one: its sums would be of both.
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

TEST(OddLosses, TheNormToClipIsThatOfWhatTheLoopWrote) {
  const auto batch = make_batch(4, 1);
  TinyModel model;
  Engine engine(model.view(), sgd());
  engine.backward(Loss::mean(mean_loss(model, batch), 4));
  engine.begin_update();
  std::vector<at::Tensor> gradients;
  double squares = 0;
  for (const auto& parameter : model.named()) {
    gradients.push_back(engine.gradient(parameter.name));
    gradients.back().mul_(100);
    squares += gradients.back().to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(engine.clip_grad_norm(1), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  // And what is written after that counts, too.
  const auto before = model.b2.detach().clone();
  for (auto& gradient : gradients) gradient.zero_();
  gradients.back().fill_(0.1);
  const auto result = engine.step();
  EXPECT_NEAR(result.grad_norm, 0.1 * std::sqrt(5), 1e-6);
  EXPECT_TRUE(model.b2.allclose(before - 0.1 * 0.1, 1e-5, 1e-6));
}

TEST(OddLosses, OfACopyOfTheModelAreToldOfOnce) {
  TinyModel model;
  const TinyModel copy;
  Engine engine(model.view(), sgd());
  std::vector<std::string> told;
  auto before = log::set_sink([&](log::Level level, const std::string& line) {
    if (level == log::Level::warning) told.push_back(line);
  });
  const auto batch = make_batch(4, 1);
  const auto step = [&](const TinyModel& of) {
    engine.step(1, [&](std::size_t) { return Loss::mean(mean_loss(of, batch), 4); });
  };
  step(model);
  EXPECT_TRUE(told.empty());
  step(copy);
  step(copy);
  log::set_sink(std::move(before));
  ASSERT_EQ(told.size(), 1u);
  EXPECT_THAT(told[0], HasSubstr("the gradient of update 2 is 0 for every parameter"));
}

// Torch may hand out a gradient as the negative of what lies in its memory, as of complex numbers.
TEST(OddLosses, AGradientThatIsTheNegativeOfItsMemory) {
  for (const auto& sizes : {std::vector<std::int64_t>{}, {3}, {2, 3}}) {
    auto weight = at::full(sizes, 2.0F).requires_grad_();
    weight.register_hook([](const at::Tensor& gradient) {
      return gradient.clone(at::MemoryFormat::Contiguous)._neg_view();
    });
    Engine engine(ModelView{{{"weight", weight}}, {}, {}}, sgd());
    engine.backward(Loss::mean((weight * weight).sum(), 1));
    engine.begin_update();
    EXPECT_TRUE(engine.gradient("weight").eq(-4).all().item<bool>());
    engine.step();
    EXPECT_TRUE(weight.eq(2.4F).all().item<bool>());
  }
}

TEST(OddLosses, ComplexParametersAreNotTrained) {
  const auto weight = at::full({3}, c10::complex<float>(1, 2), at::kComplexFloat);
  const auto real = at::full({3}, 2.0F).requires_grad_();
  const ModelView view{{{"spectrum", weight}, {"real", real}}, {}, {}};
  const Engine frozen(view, sgd());
  EXPECT_TRUE(weight.eq(c10::complex<float>(1, 2)).all().item<bool>());
  auto trained = view;
  trained.parameters[0].tensor =
      at::full({3}, c10::complex<float>(1, 2), at::kComplexFloat).requires_grad_();
  EXPECT_THAT(message_of([&] { Engine(trained, sgd()); }),
              HasSubstr("parameter 'spectrum' is trainable and of type ComplexFloat"));
}

// As torch::load() does it. Whether parameters stay or are away, it must not pass unnoticed.
TEST(OddLosses, MemoryThatAParameterIsGivenLater) {
  for (const auto place : {config::Offload::none, config::Offload::host}) {
    const auto first = at::ones({300, 4}).requires_grad_(), second = at::ones({4}).requires_grad_();
    auto config = sgd();
    config.offload.parameters = place;
    Engine engine(ModelView{{{"a.weight", first}, {"b.weight", second}},
                            {},
                            {{"a", {"a.weight"}}, {"b", {"b.weight"}}}},
                  config);
    const auto a = engine.unit("a"), b = engine.unit("b");
    const auto step = [&] {
      return engine.step(1, [&](std::size_t) {
        const auto x = a([&](const at::Tensor& in) { return in * first.sum(); },
                         at::ones({}).requires_grad_());
        return Loss::mean(b([&](const at::Tensor& in) { return in + second.sum(); }, x), 1);
      });
    };
    EXPECT_EQ(step().loss, 1204);
    { const auto whole = engine.gathered(); }
    step();
    first.set_data(at::full({300, 4}, 5.0F));
    EXPECT_THAT(message_of(step), HasSubstr("parameter 'a.weight'"));
  }
}

}  // namespace
}  // namespace poise
