// Loads into engines that have been somewhere else: what a save does not know begins anew, and what
// ended in its middle is not mended in part.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <fstream>

#include "state/shard_writer.h"
#include "state/training.h"
#include "support/interrupts.h"

namespace poise {
namespace {

using testing::Interrupts;
using testing::message_of;
using testing::TempFolder;

struct Trained {
  test::GridModel model;
  Engine engine;
  explicit Trained(const Config& config) : engine(model.view(), config) { model.bind(engine); }
  StepResult step(int update) {
    return engine.step(
        std::vector{test::make_tokens(3, static_cast<std::uint64_t>(update)),
                    test::make_tokens(2, static_cast<std::uint64_t>(update + 100))},
        [&](const at::Tensor& b) { return Loss::sum(model.loss_sum(b), test::counted(b)); });
  }
};

// Calls that wait longer than an interrupt needs.
template <class Call>
void interrupted(Call&& call) {
  Stream::set_test_delay(3, 400'000);
  {
    const Interrupts interrupts;
    EXPECT_THROW(call(), Interrupted);
  }
  Stream::set_test_delay(0, 0);
}

Config states_in_file(const TempFolder& folder) {
  auto config = test::adamw_config();
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  config.offload.optimizer = config::Offload::file;
  config.offload.directory = folder.path();
  return config;
}

constexpr const char* kOther = "whose other half it would leave; load a whole save first";

TEST(HalfDone, AnUpdateIsMendedByAWholeLoadAlone) {
  const TempFolder folder;
  Trained run(states_in_file(folder));
  const auto save = run.engine.save(folder / "saves");
  const auto first = run.step(0);
  interrupted([&] { run.step(1); });
  ASSERT_NE(message_of([&] { run.step(1); }).find("ended in its middle"), std::string::npos);
  for (const auto& only : {std::vector<std::string>{}, {"*.weight"}}) {
    const auto message =
        message_of([&] { run.engine.load(save, {.weights_only = true, .only = only}); });
    EXPECT_NE(message.find("update 2 ended in its middle"), std::string::npos) << message;
    EXPECT_NE(message.find(kOther), std::string::npos) << message;
  }
  EXPECT_NE(message_of([&] { run.step(1); }).find("ended in its middle"), std::string::npos);
  run.engine.load(save);
  EXPECT_EQ(run.step(0).loss, first.loss);
}

TEST(HalfDone, ALoadIsMendedByOneOfAsMuch) {
  const TempFolder folder;
  Trained run(states_in_file(folder));
  const auto save = run.engine.save(folder / "saves");
  const auto first = run.step(0);
  const auto refused = [&](const state::LoadOptions& options) {
    const auto message = message_of([&] { run.engine.load(save, options); });
    EXPECT_NE(message.find("a load that failed midway"), std::string::npos) << message;
    EXPECT_NE(message.find(kOther), std::string::npos) << message;
    EXPECT_NE(message_of([&] { run.step(1); }).find("failed midway"), std::string::npos);
  };
  interrupted([&] { run.engine.load(save); });
  refused({.weights_only = true});
  refused({.weights_only = true, .only = {"*.weight"}});
  run.engine.load(save);
  EXPECT_EQ(run.step(0).loss, first.loss);
  interrupted([&] { run.engine.load(save, {.weights_only = true}); });
  refused({.weights_only = true, .only = {"*.weight"}});
  run.engine.load(save, {.weights_only = true});
  EXPECT_EQ(run.step(0).loss, first.loss);
}

Config in_fp16() {
  auto config = test::adamw_config();
  config.precision.dtype = config::DType::fp16;
  config.precision.initial_loss_scale = 4194304;  // 2^22: the first windows overflow
  config.precision.loss_scale_hysteresis = 1;
  config.engine.noise_scale = true;
  return config;
}

// Scale, weights of losses and measured noise are those of the save, not of what was trained since.
TEST(HalfDone, AnEngineThatGoesBackToItsBeginningIsAFreshOne) {
  const TempFolder folder;
  Trained run(in_fp16());
  const auto save = run.engine.save(folder.path());
  std::vector<StepResult> first, again;
  for (int i = 0; i < 8; ++i) first.push_back(run.step(i));
  ASSERT_EQ(first.front().status, Status::overflow);
  ASSERT_GT(first.back().noise_scale, 0);
  run.engine.load(save);
  for (int i = 0; i < 8; ++i) again.push_back(run.step(i));
  EXPECT_EQ(test::first_difference(first, again), "");
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].noise_scale, again[i].noise_scale) << i;
  }
}

// What is filled waits for the stream until the caller goes on; where the host has no memory for as
// many tiles as staging may have, it must not wait for ever.
TEST(Staging, IsWrittenInTheTilesThatThereIsMemoryFor) {
  const TempFolder folder;
  offload::HostMemory memory(c10::kCPU, 0);
  state::Staging staging(memory, 16 * static_cast<std::int64_t>(state::kTile));
  Stream stream;
  stream.submit([] {}).synchronize();  // its thread has its stack
  const auto values = test::normal({5 << 20}, 1);
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  static std::chrono::steady_clock::time_point deadline;
  deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  auto* const old_check = set_interrupt_check([] {
    if (std::chrono::steady_clock::now() > deadline) throw Interrupted{2};
  });
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  {
    state::ShardWriter writer(folder / "shard", staging, stream,
                              state::ShardWriter::Caller::goes_on);
    const rlimit small{pages * 4096 + 4 * state::kTile, limit.rlim_max};
    setrlimit(RLIMIT_AS, &small);
    EXPECT_NO_THROW(writer.write({{state::kMaster, "w", 0, values}}, {}));
    setrlimit(RLIMIT_AS, &limit);
    stream.synchronize();
    EXPECT_GT(writer.finish().bytes, values.nbytes());
  }
  set_interrupt_check(old_check);
  EXPECT_LE(memory.peak_bytes(), 4 * static_cast<std::int64_t>(state::kTile));
}

TEST(Differences, NameABufferOfTheOtherSaveAlone) {
  const TempFolder folder;
  const auto save = [&](const std::vector<NamedTensor>& buffers, const char* name) {
    const auto weight = test::normal({5}, 1).requires_grad_();
    Engine engine({{{"w", weight}}, buffers, {}}, test::adamw_config());
    return engine.save(folder.path(), {.name = name});
  };
  const auto without = save({}, "without"), with = save({{"mean", at::ones({3})}}, "with");
  EXPECT_EQ(state::differences(with, without), std::vector<std::string>{"buffer mean differs"});
  EXPECT_EQ(state::differences(without, with),
            std::vector<std::string>{"buffer mean: only in " + with});
}

// A run that goes on in fp16 from one that was not: the scale 1 of that says nothing.
TEST(HalfDone, ARunOfAnotherPrecisionHasNoLossScale) {
  const TempFolder folder;
  Trained full(test::adamw_config());
  full.step(0);
  const auto save = full.engine.save(folder.path());
  Trained half(in_fp16());
  half.engine.load(save);
  EXPECT_EQ(half.engine.loss_scale(), 4194304);
  Trained fresh(in_fp16());
  fresh.engine.load(save, {.weights_only = true});
  EXPECT_EQ(half.step(1).loss_scale, fresh.step(1).loss_scale);
}

}  // namespace
}  // namespace poise
