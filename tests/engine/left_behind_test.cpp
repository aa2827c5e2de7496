// What a call that fails or is interrupted must not leave behind: transfers into memory that others
// have by then, parameters that stay whole, halves of what was set.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "engine/state_update.h"
#include "support/interrupts.h"
#include "support/slow_span.h"
#include "support/square_layers.h"
#include "support/temp_folder.h"

namespace poise {
namespace {

using testing::Interrupts;
using testing::message_of;
using testing::TempFolder;

constexpr std::int64_t kWidth = 64, kLayers = 4;

// Layers whose parameters are away where nobody uses them.
struct Away {
  std::vector<at::Tensor> weights = test::square_layers(kLayers, kWidth, 7, 0.1);
  Engine engine;
  std::vector<zero::Unit> units;

  explicit Away(const Config& config) : engine(test::view_of_layers(weights), config) {
    for (int i = 0; i < kLayers; ++i) units.push_back(engine.unit(join("layers.", i)));
  }
  Loss loss(const at::Tensor& batch) const {
    auto x = batch;
    for (std::size_t i = 0; i < units.size(); ++i) {
      x = units[i]([&](const at::Tensor& in) { return at::relu(at::linear(in, weights[i])) + in; },
                   x);
    }
    return Loss::mean(at::mse_loss(x, batch), static_cast<double>(batch.size(0)));
  }
  StepResult step(std::uint64_t seed) {
    return engine.step(std::vector{test::normal({4, kWidth}, seed)},
                       [&](const at::Tensor& batch) { return loss(batch); });
  }
  std::int64_t gathered() const {
    const auto books = engine.ledger().snapshot();
    return books.current[static_cast<std::size_t>(memory::Account::gathered)];
  }
};

Config away() {
  Config config;
  config.optimizer.lr = 1e-2;
  config.offload.parameters = config::Offload::host;
  return config;
}

// The one on its way ahead would come into memory that was given back.
TEST(LeftBehind, GathersThatAnInterruptedWindowHadInFlight) {
  Away run(away()), undisturbed(away());
  for (auto* one : {&run, &undisturbed}) one->step(1);
  for (std::uint64_t delays = 1; delays < 4; ++delays) {
    Stream::set_test_delay(delays, 400'000);  // waits look for Ctrl-C every 50 ms
    {
      const Interrupts interrupts;
      EXPECT_THROW(run.step(2), Interrupted);
    }
    Stream::set_test_delay(0, 0);
    std::this_thread::sleep_for(
        std::chrono::milliseconds(500));  // until what was on its way is there
  }
  for (std::uint64_t update = 3; update < 6; ++update) {
    EXPECT_EQ(run.step(update).loss, undisturbed.step(update).loss);
  }
  EXPECT_EQ(run.gathered(), 0);
}

TEST(LeftBehind, ParametersOfAGatheredThatFoundNoMemory) {
  auto config = away();
  Away run(config);
  run.step(1);
  config.memory.budget_bytes = run.step(2).peak_bytes;
  Away tight(config);
  tight.step(1);
  EXPECT_THROW(
      {
        const memory::AccountScope scope(tight.engine.ledger(), memory::Account::other);
        const auto left =
            config.memory.budget_bytes - tight.engine.ledger().snapshot().current_bytes;
        const auto most = at::empty({left - 2 * 4 * kWidth * kWidth}, at::kByte);
        tight.engine.gathered();
      },
      c10::OutOfMemoryError);
  EXPECT_EQ(tight.gathered(), 0);
  tight.step(2);
}

TEST(LeftBehind, ParametersOfAGatheredWhoseEndWasInterrupted) {
  const TempFolder folder;
  auto config = away();
  config.offload.parameters = config::Offload::file;
  config.offload.directory = folder.path();
  Away run(config);
  run.step(1);
  int interrupted = 0;
  for (std::uint64_t delays = 1; delays < 4; ++delays) {
    auto whole = run.engine.gathered(0);
    Stream::set_test_delay(delays, 400'000);
    try {
      const Interrupts interrupts;
      whole.close();
    } catch (const Interrupted&) {
      ++interrupted;
    }
    Stream::set_test_delay(0, 0);
    EXPECT_EQ(run.gathered(), 0);
  }
  EXPECT_GT(interrupted, 0);
  run.step(2);
}

TEST(LeftBehind, TilesThatAnInterruptedUpdateHadOnTheirWay) {
  constexpr std::int64_t kNumel = 5000;
  std::promise<void> go;
  Stream stream;
  const auto may_go = go.get_future().share();
  engine::OptimizerState state;
  state.master = std::make_shared<testing::SlowSpan>(kNumel, stream, may_go);
  state.gradient = offload::resident(test::normal({kNumel}, 1));
  state.segments = {{0, kNumel, 0}};
  std::vector<engine::OptimizerState> states{state};
  config::OffloadPolicy policy;
  policy.block_bytes = 4096;
  policy.staging_bytes = 16 * 4096;
  offload::HostMemory memory(c10::kCPU, 0);
  engine::StateUpdate update(states, policy, memory);
  std::thread disk([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    go.set_value();
  });
  {
    const Interrupts interrupts;
    EXPECT_THROW(update.run([](optim::Span&) {}, [](int) {}), Interrupted);
  }
  EXPECT_EQ(may_go.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  disk.join();
}

TEST(LeftBehind, AFirstMomentWhoseSecondWasRefused) {
  Away run({});
  run.step(1);
  const auto before = run.engine.moments("layers.0");
  const std::vector<at::Tensor> wrong{at::full({kWidth, kWidth}, 3.f), at::full({2}, 3.f)};
  EXPECT_NE(message_of([&] { run.engine.set_moments("layers.0", wrong); }).find("of shape [2]"),
            std::string::npos);
  EXPECT_TRUE(at::equal(run.engine.moments("layers.0")[0], before[0]));
}

}  // namespace
}  // namespace poise
