// Offloaded states of one engine: within a budget they do not fit, within the staging that is
// documented, read and written where they live, and never silently wrong after a failure.
#include <ATen/ops/equal.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "engine/state_update.h"
#include "support/scratch_descriptor.h"
#include "support/square_layers.h"
#include "support/temp_folder.h"

namespace poise {
namespace {

using config::Offload;
using memory::Account;
using test::normal;
using testing::message_of;
using testing::TempFolder;

// Layers of one width; their states are far larger than what backward keeps.
struct Stack {
  static constexpr std::int64_t kWidth = 128;
  std::vector<at::Tensor> weights;
  std::vector<zero::Unit> units;

  explicit Stack(int layers = 8)
      : weights(test::square_layers(layers, kWidth, 50, 0.15)),
        units(static_cast<std::size_t>(layers)) {}
  ModelView view() const { return test::view_of_layers(weights); }
  Loss loss(const at::Tensor& batch) const {
    auto x = batch.to(weights[0].scalar_type());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      x = units[i]([&](const at::Tensor& in) { return at::relu(at::linear(in, weights[i])) + in; },
                   x);
    }
    return Loss::mean(at::mse_loss(x.to(at::kFloat), batch), static_cast<double>(batch.size(0)));
  }
  void bind(const Engine& engine) {
    for (std::size_t i = 0; i < units.size(); ++i) units[i] = engine.unit(join("layers.", i));
  }
  std::int64_t numel() const { return static_cast<std::int64_t>(weights.size()) * kWidth * kWidth; }
};

std::vector<at::Tensor> window(int update) {
  const auto seed = static_cast<std::uint64_t>(1000 + 10 * update);
  return {normal({4, Stack::kWidth}, seed), normal({4, Stack::kWidth}, seed + 1)};
}

Config bf16() {
  Config config;
  config.optimizer.lr = 1e-3;
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  return config;
}

Config in_file(Config config, const TempFolder& folder) {
  config.offload.optimizer = Offload::file;
  config.offload.directory = folder.path();
  config.offload.block_bytes = 8192;
  config.offload.staging_bytes = 16 * 8192;
  config.offload.queue_depth = 2;
  return config;
}

StepResult step(Engine& engine, const Stack& model, int update) {
  return engine.step(window(update), [&](const at::Tensor& b) { return model.loss(b); });
}

TEST(Offload, StatesThatDoNotFitTheBudgetTrainInsideIt) {
  TempFolder folder;
  Stack plain_model;
  Engine plain(plain_model.view(), bf16());
  std::vector<StepResult> expected;
  for (int i = 0; i < 5; ++i) expected.push_back(step(plain, plain_model, i));
  const auto states = 12 * plain_model.numel();  // masters and two moments, fp32
  const auto budget = states / 2 + states / 6;   // gradients are a third of it, values a sixth
  ASSERT_GT(expected.back().peak_bytes, states + budget / 2);

  auto host = bf16();
  host.offload.optimizer = Offload::host;
  for (auto config : {host, in_file(bf16(), folder)}) {
    config.memory.budget_bytes = budget;
    Stack model;
    Engine engine(model.view(), config);
    for (int i = 0; i < 5; ++i) {
      const auto result = step(engine, model, i);
      EXPECT_EQ(result.loss, expected[static_cast<std::size_t>(i)].loss) << i;
      EXPECT_LE(result.peak_bytes, budget);
      EXPECT_EQ(result.accounts[static_cast<std::size_t>(Account::optimizer)], 0);
    }
    for (std::size_t i = 0; i < model.weights.size(); ++i) {
      EXPECT_TRUE(at::equal(model.weights[i], plain_model.weights[i])) << i;
      const auto name = join("layers.", i);
      EXPECT_TRUE(at::equal(engine.master(name), plain.master(name))) << i;
    }
  }
  auto unfit = bf16();
  unfit.memory.budget_bytes = budget;
  Stack model;
  EXPECT_THROW(Engine(model.view(), unfit), c10::OutOfMemoryError) << "the budget is real";
}

// States of 18 bytes for each parameter in 4.5 of them, and in 2.25 where parameters leave, too.
TEST(Offload, AModelOfSeveralTimesTheBudgetTrainsInsideIt) {
  TempFolder folder;
  Stack plain_model(16);
  Engine plain(plain_model.view(), bf16());
  std::vector<double> losses;
  for (int i = 0; i < 4; ++i) losses.push_back(step(plain, plain_model, i).loss);
  const auto states = 18 * plain_model.numel();
  const std::pair<int, Offload> ways[] = {
      {4, Offload::host}, {8, Offload::host}, {8, Offload::file}};
  for (const auto& [times, gradients] : ways) {
    SCOPED_TRACE(join(times, gradients == Offload::file ? ", gradients in a file" : ""));
    auto config = in_file(bf16(), folder);
    config.memory.budget_bytes = states / times;
    config.offload.gradients = gradients;
    if (times == 8) config.offload.parameters = Offload::file;
    Stack model(16);
    Engine engine(model.view(), config);
    model.bind(engine);
    for (int i = 0; i < 4; ++i) {
      const auto result = step(engine, model, i);
      EXPECT_EQ(result.loss, losses[static_cast<std::size_t>(i)]);
      EXPECT_LE(result.peak_bytes, states / times);
      if (gradients == Offload::file) {  // and the host holds a few units' sums, not all 16
        EXPECT_EQ(result.file_bytes, states);
        EXPECT_LE(result.host_bytes,
                  config.offload.staging_bytes + 4 * 8192 + 3 * 4 * Stack::kWidth * Stack::kWidth);
      }
    }
    const auto whole = engine.gathered();
    for (std::size_t i = 0; i < model.weights.size(); ++i) {
      ASSERT_TRUE(at::equal(model.weights[i], plain_model.weights[i])) << i;
    }
  }
}

std::vector<at::Tensor> large(int update) {
  return {normal({256, Stack::kWidth}, 77u + static_cast<unsigned>(update))};
}

TEST(Offload, ActivationsLeaveTheDeviceUntilBackward) {
  TempFolder folder;
  const auto train = [&](const Config& config, Stack& model) {
    Engine engine(model.view(), config);
    StepResult result;
    for (int i = 0; i < 3; ++i) {
      result = engine.step(large(i), [&](const at::Tensor& b) { return model.loss(b); });
    }
    return result;
  };
  Stack plain_model(12);
  const auto plain = train(bf16(), plain_model);
  const auto activations = static_cast<std::size_t>(Account::activations);
  for (const auto where : {Offload::host, Offload::file}) {
    auto config = where == Offload::file ? in_file(bf16(), folder) : bf16();
    config.offload.optimizer = Offload::none;
    config.offload.activations = where;
    config.offload.activation_min_bytes = 4096;
    Stack model(12);
    const auto result = train(config, model);
    EXPECT_EQ(result.loss, plain.loss);
    EXPECT_LT(result.accounts[activations], plain.accounts[activations] / 2);
    EXPECT_GT(where == Offload::file ? result.file_bytes : result.host_bytes,
              plain.accounts[activations] / 3);
    for (std::size_t i = 0; i < model.weights.size(); ++i) {
      EXPECT_TRUE(at::equal(model.weights[i], plain_model.weights[i])) << i;
    }
  }
}

// Of the units that config names; the model puts the scope around them.
TEST(Offload, ActivationsOfChosenUnits) {
  Stack plain_model(4);
  Engine plain(plain_model.view(), bf16());
  auto config = bf16();
  config.offload.activations = Offload::host;
  config.offload.activation_min_bytes = 1;
  config.offload.activation_units = {"second"};
  Stack model(4);
  Engine engine(model.view(), config);
  const auto away = engine.activation_offload();
  ASSERT_TRUE(away.has_value());
  std::vector<std::int64_t> host;
  for (const bool chosen : {false, true}) {
    const auto result = engine.step(large(chosen), [&](const at::Tensor& b) {
      const auto scope = chosen ? away->scope() : nullptr;
      return model.loss(b);
    });
    const auto expected =
        plain.step(large(chosen), [&](const at::Tensor& b) { return plain_model.loss(b); });
    EXPECT_EQ(result.loss, expected.loss);
    host.push_back(result.host_bytes);
  }
  EXPECT_EQ(host[0], 0);
  EXPECT_GT(host[1], 0);
  EXPECT_FALSE(plain.activation_offload().has_value());
}

TEST(Offload, BytesAreWhereTheResultSaysTheyAre) {
  TempFolder folder;
  Stack model;
  const auto config = in_file(bf16(), folder);
  Engine engine(model.view(), config);
  const auto result = step(engine, model, 0);
  EXPECT_EQ(result.file_bytes, 12 * model.numel());
  EXPECT_LE(result.host_bytes, config.offload.staging_bytes + 2 * 2 * 8192);
  EXPECT_GT(result.host_bytes, 2 * 2 * 8192);

  auto host = bf16();
  host.offload.optimizer = Offload::host;
  host.offload.optimizer_fraction = 0.5;
  Stack other;
  Engine half(other.view(), host);
  EXPECT_EQ(step(half, other, 0).host_bytes, 6 * other.numel());
  EXPECT_EQ(half.ledger().snapshot().current[static_cast<std::size_t>(Account::optimizer)],
            6 * other.numel());
}

int descriptors() {
  DIR* directory = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

TEST(Offload, AThousandUpdatesHoldNothingMore) {
  TempFolder folder;
  Stack model(1);
  Engine engine(model.view(), in_file(bf16(), folder));
  const auto batch = window(0);
  const auto update = [&] {
    return engine.step(batch, [&](const at::Tensor& b) { return model.loss(b); });
  };
  update();
  const auto first = update();
  const auto open = descriptors();
  StepResult last;
  for (int i = 0; i < 1000; ++i) last = update();
  EXPECT_EQ(last.peak_bytes, first.peak_bytes);
  EXPECT_EQ(last.host_bytes, first.host_bytes);
  EXPECT_EQ(last.file_bytes, first.file_bytes);
  EXPECT_EQ(descriptors(), open);
}

TEST(Offload, EditsReachMastersInTheFile) {
  TempFolder folder;
  Stack model(2), plain_model(2);
  Engine engine(model.view(), in_file(bf16(), folder)), plain(plain_model.view(), bf16());
  const auto edit = [](Engine& e, Stack& m) {
    step(e, m, 0);
    {
      const at::NoGradGuard no_grad;
      m.weights[0].mul_(0.5);                         // noticed
      at::Tensor(m.weights[1].detach()).fill_(0.25);  // told
    }
    e.refresh("layers.1");
    step(e, m, 1);
    auto whole = e.gathered(0);
    {
      const at::NoGradGuard no_grad;
      m.weights[1].fill_(2);
    }
    whole.close();
    step(e, m, 2);
  };
  edit(engine, model);
  edit(plain, plain_model);
  for (const auto* name : {"layers.0", "layers.1"}) {
    EXPECT_TRUE(at::equal(engine.master(name), plain.master(name))) << name;
  }
}

TEST(Offload, AFileCutBetweenUpdatesEndsTheTrainingWithItsReason) {
  TempFolder folder;
  Stack model;
  Engine engine(model.view(), in_file(bf16(), folder));
  step(engine, model, 0);
  const int scratch = testing::scratch_descriptor(folder.path());
  ASSERT_GE(scratch, 0);
  ASSERT_EQ(ftruncate(scratch, 100000), 0);
  const auto first = message_of([&] { step(engine, model, 1); });
  EXPECT_NE(first.find("[offload] cannot read"), std::string::npos) << first;
  EXPECT_NE(first.find("the file was cut short"), std::string::npos) << first;
  for (const auto& use : std::vector<std::function<void()>>{[&] { step(engine, model, 2); },
                                                            [&] { engine.master("layers.0"); },
                                                            [&] { engine.gathered(); }}) {
    const auto later = message_of(use);
    EXPECT_NE(later.find("[engine] update 2 ended in its middle"), std::string::npos) << later;
    EXPECT_NE(later.find("the file was cut short"), std::string::npos) << later;
  }
}

// All arrays through staging, as they go where the device is a GPU.
TEST(StateUpdate, StagedAndInPlaceAreTheSameBits) {
  constexpr std::int64_t kNumel = 5000;
  config::OptimizerPolicy policy;
  policy.lr = 1e-2;
  const auto optimizer = optim::make_optimizer(policy);
  config::OffloadPolicy offload;
  offload.block_bytes = 4096;
  offload.staging_bytes = 16 * 4096;
  struct Made {
    engine::OptimizerState state;
    at::Tensor low = at::empty({kNumel}, at::kBFloat16).zero_();
    Made(std::uint64_t seed) {
      state.master = offload::resident(normal({kNumel}, seed));
      for (int i = 0; i < 2; ++i) {
        state.moments.push_back(offload::resident(at::zeros({kNumel}, at::kFloat)));
        state.blocks.push_back(1);
      }
      state.low = offload::resident(low);
      state.gradient = offload::resident(normal({kNumel}, seed + 100));
      state.segments = {{0, 1, 0}, {1, 1500, 1}, {2048, 4999, 0}};
    }
  };
  const auto run = [&](engine::StateUpdate::Direct direct) {
    std::vector<Made> made;
    made.emplace_back(1);
    made.emplace_back(2);
    std::vector<engine::OptimizerState> states{made[0].state, made[1].state};
    offload::HostMemory memory(c10::Device(c10::kCPU), 0);
    engine::StateUpdate update(states, offload, memory, direct);
    EXPECT_LE(update.staging_bytes(), offload.staging_bytes);
    std::vector<int> flats;
    for (int i = 1; i <= 3; ++i) {
      update.run(
          [&](optim::Span& span) {
            optimizer->apply(span, {{1e-2, 0.1}, {1e-3, 0}}, i, 0.5);
          },
          [&](int flat) { flats.push_back(flat); });
    }
    EXPECT_EQ(flats.size(), 6u) << "each flat is told once an update";
    return made;
  };
  const auto in_place = run(engine::StateUpdate::Direct::yes);
  Stream::set_test_delay(3, 200);
  const auto staged = run(engine::StateUpdate::Direct::no);
  Stream::set_test_delay(0, 0);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::equal(in_place[i].low, staged[i].low));
    EXPECT_GT(in_place[i].low.abs().sum().item<float>(), 0);
    EXPECT_TRUE(at::equal(in_place[i].state.master->tensor(), staged[i].state.master->tensor()));
    for (std::size_t m = 0; m < 2; ++m) {
      EXPECT_TRUE(
          at::equal(in_place[i].state.moments[m]->tensor(), staged[i].state.moments[m]->tensor()));
    }
  }
}

}  // namespace
}  // namespace poise
