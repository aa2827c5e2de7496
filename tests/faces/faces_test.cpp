// The four small classes against a float64 loop.
#include "poise/faces.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/sin.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "support/ranks.h"
#include "support/tiny_model.h"

namespace poise {
namespace {

using test::Batch;
using test::make_batch;
using test::mean_loss;
using test::TinyModel;

Config settings() {
  Config config;
  config.optimizer.lr = 0.01;
  config.optimizer.weight_decay = 0.1;
  config.optimizer.max_grad_norm = 0;
  return config;
}

std::vector<Batch> ragged(int count) {
  std::vector<Batch> batches;
  for (int i = 0; i < count; ++i) batches.push_back(make_batch(3 + i, 20 + i, i % 3));
  return batches;
}

TEST(GradientAccumulationSystem, AWindowOfNothingIsRefused) {
  for (const std::int64_t steps : {0, -1}) {
    AccumulationConfig config;
    config.accumulation_steps = steps;
    EXPECT_THROW(GradientAccumulationSystem{config}, Error);
  }
}

TEST(GradientAccumulationSystem, OneCallIsOneWindowAndItsLoss) {
  AccumulationConfig config;
  config.accumulation_steps = 2;
  TinyModel model;
  test::Reference reference(model, settings().optimizer);
  GradientAccumulationSystem system(config);
  system.over(model.view(), settings());
  const auto batches = ragged(5);
  const auto loss = [&](const Batch& batch) {
    return Loss::mean(mean_loss(model, batch), batch.counted());
  };
  auto data = batches.begin();
  for (const auto& window :
       {std::vector<Batch>{batches[0], batches[1]}, std::vector<Batch>{batches[2], batches[3]},
        std::vector<Batch>{batches[4]}}) {
    const auto got = system.core_operation(data, batches.end(), loss);
    ASSERT_TRUE(got.has_value());
    EXPECT_NEAR(*got, reference.step(window, 0.01).loss, 1e-6);
    EXPECT_EQ(system.last_result().micro_batches, static_cast<std::int64_t>(window.size()));
  }
  EXPECT_FALSE(system.core_operation(data, batches.end(), loss).has_value());
  EXPECT_EQ(system.engine().updates(), 3);
  EXPECT_LT(test::largest_error(model, reference), 1e-6);
}

TEST(GradientAccumulationSystem, ItsConfigSaysWhatTheEngineDoes) {
  AccumulationConfig config;
  config.micro_batch_size = 3;
  config.accumulation_steps = 4;
  config.dtype = config::DType::fp16;
  config.loss_scale = 128;
  config.gradient_checkpointing = true;
  config.checkpoint_interval = 2;
  TinyModel model;
  GradientAccumulationSystem system(config);
  system.over(model.view());
  EXPECT_EQ(system.engine().config().batch.accumulation, 4);
  EXPECT_EQ(system.engine().loss_scale(), 128);
  EXPECT_TRUE(system.checkpoint().enabled());
  config.dtype = config::DType::bf16;
  EXPECT_THROW(GradientAccumulationSystem(config).over(model.view()), Error);
  EXPECT_THROW(GradientAccumulationSystem({}).engine(), Error);
}

TEST(ActivationCheckpoint, RecomputesEveryNthBlockWhereThatIsNeeded) {
  ActivationCheckpoint checkpoint(2);
  EXPECT_FALSE(checkpoint.enable_if_needed(10, 20));
  std::vector<int> calls(4);
  const auto run = [&] {
    auto x = test::normal({3, 3}, 1).requires_grad_();
    auto y = x;
    for (int i = 0; i < 4; ++i) {
      y = checkpoint.block(
          i,
          [&calls, i](const at::Tensor& input) {
            ++calls[static_cast<std::size_t>(i)];
            return (input * input).sin();
          },
          y);
    }
    return torch::autograd::grad({y.sum()}, {x}).front();
  };
  const auto kept = run();
  EXPECT_THAT(calls, ::testing::Each(1));
  EXPECT_TRUE(checkpoint.enable_if_needed(30, 20));
  calls.assign(4, 0);
  EXPECT_TRUE(at::equal(run(), kept));
  EXPECT_THAT(calls, ::testing::ElementsAre(1, 2, 1, 2));
  checkpoint.disable();
  EXPECT_FALSE(checkpoint.enabled());
  EXPECT_THROW(ActivationCheckpoint(0), Error);
}

TEST(MixedPrecisionTrainer, UnscalesBeforeItClips) {
  TinyModel model;
  auto clipped = settings();
  clipped.optimizer.type = "sgd";
  clipped.optimizer.weight_decay = 0;
  test::Reference reference(model, clipped.optimizer);
  MixedPrecisionTrainer trainer(config::DType::fp16, 256);
  trainer.over(model.view(), clipped);
  const auto batch = make_batch(8, 3);
  {
    const auto scope = trainer.autocast();
    const auto loss = mean_loss(model, batch);
    trainer.backward(Loss::mean(loss, batch.counted()));
  }
  const double norm = trainer.clip_grad_norm(0.25);
  const auto result = trainer.update_scale();
  EXPECT_EQ(trainer.loss_scale(), 256);
  EXPECT_NEAR(result.clipped_norm, 0.25, 1e-4);
  const auto exact = reference.step({batch}, 0.01);
  EXPECT_NEAR(norm, exact.norm, 1e-2 * exact.norm);  // a forward in fp16
  EXPECT_NEAR(result.loss, exact.loss, 1e-2 * exact.loss);
}

TEST(MixedPrecisionTrainer, AnOverflowChangesTheScaleAlone) {
  TinyModel model;
  MixedPrecisionTrainer trainer(config::DType::fp16);
  trainer.over(model.view(), settings());
  const auto before = model.w1.detach().clone();
  const double scale = trainer.loss_scale();
  {
    const auto scope = trainer.autocast();
    trainer.backward(Loss::mean(mean_loss(model, make_batch(4, 3)).to(at::kFloat) * 1e38, 4));
  }
  EXPECT_NE(trainer.update_scale().status, Status::applied);
  EXPECT_EQ(trainer.loss_scale(), scale / 2);
  EXPECT_TRUE(at::equal(before, model.w1.detach()));
}

TEST(ZeROOptimizer, HasTheStagesOverRanks) {
  for (const std::int64_t stage : {0, 1, 2}) {
    const auto batches = ragged(2);
    TinyModel alone;
    test::Reference reference(alone, settings().optimizer);
    reference.step(batches, 0.01);
    testing::on_ranks(2, [&](const std::shared_ptr<comm::Group>& group) {
      TinyModel model;
      ZeROOptimizer optimizer(stage);
      optimizer.over(model.view(), settings(), group);
      const auto& mine = batches[static_cast<std::size_t>(group->rank())];
      const auto run = [&](double factor) {
        const auto scope = optimizer.engine().forward_scope();
        optimizer.engine().backward(Loss::mean(mean_loss(model, mine) * factor, mine.counted()));
      };
      run(3.0);
      optimizer.zero_grad();  // dropped
      run(1.0);
      optimizer.reduce_scatter_gradients();
      EXPECT_EQ(optimizer.step().status, Status::applied);
      const auto whole = optimizer.gather_parameters();
      EXPECT_LT(test::largest_error(model, reference), 1e-6) << "stage " << stage;
    });
  }
}

TEST(ZeROOptimizer, OffloadedStatesChangeNoBit) {
  std::vector<at::Tensor> seen;
  for (const auto place : {config::Offload::none, config::Offload::host}) {
    TinyModel model;
    config::OffloadPolicy offload;
    offload.optimizer = place;
    ZeROOptimizer optimizer(1, offload);
    optimizer.over(model.view(), settings());
    {
      const auto scope = optimizer.engine().forward_scope();
      optimizer.engine().backward(Loss::mean(mean_loss(model, make_batch(5, 1)), 5));
    }
    EXPECT_EQ(optimizer.step().host_bytes > 0, place == config::Offload::host);
    seen.push_back(model.w1.detach().clone());
  }
  EXPECT_TRUE(at::equal(seen[0], seen[1]));
}

}  // namespace
}  // namespace poise
