// Sums of gradients in a file, of which a few units' are in memory at a time: whatever reads and
// writes them finds those of the device, and a file that fails is named.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tanh.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "support/scratch_descriptor.h"
#include "support/square_layers.h"
#include "support/temp_folder.h"

namespace poise {
namespace {

using test::normal;
using testing::message_of;
using testing::TempFolder;

// Six units, more than there are rooms for, and one parameter that only some micro-batches use.
struct Layers {
  static constexpr std::int64_t kWidth = 64;  // a weight is a multiple of a sector
  std::vector<at::Tensor> weights = test::square_layers(6, kWidth, 20, 0.2);
  at::Tensor rare = normal({kWidth}, 5).requires_grad_();

  ModelView view() const {
    auto made = test::view_of_layers(weights);
    made.parameters.push_back({"rare", rare});
    made.units.push_back({"rare", {"rare"}});
    return made;
  }
  // Every weight is used twice, so that sums come back to where they were.
  Loss loss(const at::Tensor& batch) const {
    auto x = batch.to(weights[0].scalar_type());
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& weight : weights) x = at::tanh(at::linear(x, weight)) + x;
    }
    if (batch.size(0) % 2 == 1) x = x * rare;
    return Loss::mean(at::mse_loss(x.to(at::kFloat), batch), static_cast<double>(batch.size(0)));
  }
};

Config filed(Config config, const TempFolder& folder) {
  config.offload.gradients = config::Offload::file;
  config.offload.directory = folder.path();
  config.offload.block_bytes = 4096;
  config.offload.staging_bytes = 16 * 4096;
  config.offload.queue_depth = 2;
  return config;
}

at::Tensor batch_of(std::int64_t rows, std::uint64_t seed) {
  return normal({rows, Layers::kWidth}, seed);
}

// Ended and open windows, gradients read and written in between.
std::vector<at::Tensor> train(const Config& config) {
  Layers model;
  Engine engine(model.view(), config);
  std::vector<at::Tensor> seen;
  for (std::uint64_t update = 0; update < 4; ++update) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      const auto rows =
          update == 1 ? 4 : 3 + static_cast<std::int64_t>(i);  // rare: not in window 1
      engine.backward(model.loss(batch_of(rows, 10 * update + i)));
    }
    if (update == 2) {
      engine.discard_window();  // half-made sums are nobody's
      continue;
    }
    engine.begin_update();
    for (const auto* name : {"layers.5", "layers.0", "rare", "layers.3", "layers.0"}) {
      seen.push_back(engine.gradient(name).clone());
    }
    if (update == 1) {
      const at::NoGradGuard no_grad;
      engine.gradient("layers.1").mul_(3);
      engine.gradient("rare").fill_(0.125);
    }
    const auto result = engine.step();
    for (const double value : {result.loss, result.grad_norm, result.clipped_norm}) {
      seen.push_back(at::full({1}, value, at::kDouble));
    }
  }
  for (const auto& weight : model.weights) seen.push_back(weight.detach().clone());
  seen.push_back(model.rare.detach().clone());
  return seen;
}

class FileGradients : public ::testing::TestWithParam<std::string> {};

TEST_P(FileGradients, AreThoseOfTheDevice) {
  Config config;
  config.optimizer.lr = 1e-2;
  config.optimizer.max_grad_norm = 0.5;
  config.batch.accumulation = 3;
  if (GetParam() != "fp32")
    config.precision.dtype = config.precision.parameters = config::DType::bf16;
  if (GetParam() == "bf16_sums") config.precision.fp32_accumulation = false;
  if (GetParam() == "noise") config.engine.noise_scale = true;
  const auto expected = train(config);
  TempFolder folder;
  for (const auto& states : {config::Offload::none, config::Offload::file}) {
    auto away = filed(config, folder);
    away.offload.optimizer = states;
    Stream::set_test_delay(11, 100);
    const auto seen = train(away);
    Stream::set_test_delay(0, 0);
    ASSERT_EQ(seen.size(), expected.size());
    for (std::size_t i = 0; i < seen.size(); ++i) {
      EXPECT_TRUE(at::equal(seen[i], expected[i])) << i;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Precisions, FileGradients,
                         ::testing::Values("fp32", "bf16", "bf16_sums", "noise"),
                         [](const auto& info) { return info.param; });

TEST(FileGradients, HoldAFewUnitsAtATime) {
  TempFolder folder;
  Layers model;
  const auto config = filed(Config(), folder);
  Engine engine(model.view(), config);
  const auto unit = 4 * Layers::kWidth * Layers::kWidth;
  for (std::uint64_t update = 0; update < 20; ++update) {
    const auto result = engine.step(std::vector{batch_of(3, update), batch_of(4, update)},
                                    [&](const at::Tensor& b) { return model.loss(b); });
    EXPECT_EQ(result.accounts[static_cast<std::size_t>(memory::Account::gradients)], 0);
    EXPECT_EQ(result.file_bytes, 6 * unit + 4096) << "rare takes a sector";
    EXPECT_LE(result.host_bytes, 3 * unit + config.offload.staging_bytes + 2 * 2 * 4096);
  }
}

TEST(FileGradients, AFileCutInsideAWindowIsNamedAndNothingOfItApplied) {
  TempFolder folder;
  Layers model;
  Config config;
  config.batch.accumulation = 2;
  Engine engine(model.view(), filed(config, folder));
  const Layers before;
  engine.backward(model.loss(batch_of(3, 1)));
  const int scratch = testing::scratch_descriptor(folder.path());
  ASSERT_GE(scratch, 0);
  ASSERT_EQ(ftruncate(scratch, 0), 0);
  const auto window = [](Engine& one, const Layers& of) {
    one.backward(of.loss(batch_of(3, 2)));
    one.backward(of.loss(batch_of(3, 3)));
    one.step();
  };
  const auto message = message_of([&] { window(engine, model); });
  EXPECT_NE(message.find("[offload] cannot read"), std::string::npos) << message;
  EXPECT_NE(message.find("the file was cut short"), std::string::npos) << message;
  for (std::size_t i = 0; i < model.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(model.weights[i], before.weights[i])) << i;
  }
  // What is written after that is there, and checked as ever.
  Layers undisturbed;
  Engine other(undisturbed.view(), config);
  for (int update = 0; update < 2; ++update) {
    window(engine, model);
    window(other, undisturbed);
  }
  for (std::size_t i = 0; i < model.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(model.weights[i], undisturbed.weights[i])) << i;
  }
}

TEST(FileGradients, ALimitOfTheFileIsAnErrorWithItsReason) {
  TempFolder folder;
  Layers model;
  Engine engine(model.view(), filed(Config(), folder));
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{8192, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto message = message_of([&] {
    engine.step(std::vector{batch_of(3, 1), batch_of(3, 2)},
                [&](const at::Tensor& b) { return model.loss(b); });
  });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("[offload] cannot write"), std::string::npos) << message;
}

// The sum that is ready last goes out when the window has ended, and before its update begins.
TEST(FileGradients, ALastWriteThatFailsLeavesTheUpdateUntouched) {
  TempFolder folder;
  Layers model;
  ModelView view;  // the first to be used lies last in the file
  for (const auto i : {5, 4, 3, 2, 1, 0}) {
    const auto name = join("layers.", i);
    view.parameters.push_back({name, model.weights[static_cast<std::size_t>(i)]});
    view.units.push_back({name, {name}});
  }
  Config config;
  config.batch.accumulation = 1;
  Engine engine(view, filed(config, folder));
  const Layers before;
  constexpr rlim_t kUnit = 4 * Layers::kWidth * Layers::kWidth;
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{5 * kUnit, limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  engine.backward(model.loss(batch_of(4, 1)));
  const auto message = message_of([&] { engine.step(); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("[offload] cannot write"), std::string::npos) << message;
  EXPECT_EQ(message.find("middle"), std::string::npos) << message;
  for (std::size_t i = 0; i < model.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(model.weights[i], before.weights[i])) << i;
  }
}

}  // namespace
}  // namespace poise
