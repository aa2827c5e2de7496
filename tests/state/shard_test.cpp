// A shard that is written straight from where its values lie is the one that passes through tiles.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>

#include "poise/interrupt.h"
#include "state/fast_copy.h"
#include "state/files.h"
#include "state/training.h"
#include "support/folder_in_memory.h"

namespace poise {
namespace {

using testing::TempFolder;

constexpr std::int64_t kSmallSaves = 48 << 20, kThreeSaves = 150 << 20;  // bytes in memory

// Values that are large enough to be written apart, between small ones.
struct Trained {
  std::vector<at::Tensor> weights;
  std::unique_ptr<Engine> engine;
  explicit Trained(bool asynchronous,
                   std::vector<std::int64_t> sizes = {7, 400'003, 5, 300'000, 1'100'001, 3}) {
    ModelView view;
    std::uint64_t seed = 0;
    for (const auto numel : sizes) {
      weights.push_back(test::normal({numel}, ++seed).requires_grad_());
      view.parameters.push_back({"w" + std::to_string(seed), weights.back()});
    }
    view.buffers.push_back({"odd", at::ones({3}, at::kByte)});
    auto config = test::adamw_config();
    config.state.asynchronous = asynchronous;
    engine = std::make_unique<Engine>(view, config);
    step();
  }
  void step() {
    engine->step(1, [&](std::size_t) {
      auto sum = weights[0].square().sum();
      for (const auto& weight : weights) sum = sum + weight.square().sum();
      return Loss::sum(sum, 1);
    });
  }
};

TEST(Shard, IsTheSameFromTilesAndFromWhereItsValuesLie) {
  const testing::FolderInMemory memory(kSmallSaves);
  if (!memory.is_there()) GTEST_SKIP() << "no room in /dev/shm";
  const TempFolder disk;
  Trained waits(false), goes_on(true);
  waits.engine->save(memory.path(), {.name = "in_place"});
  goes_on.engine->save(memory.path(), {.name = "tiles"});
  goes_on.engine->finish_save();
  waits.engine->save(disk.path(), {.name = "disk"});
  const auto folder = memory.path() + "/";
  for (const auto& save : {folder + "in_place", folder + "tiles", disk / "disk"}) {
    state::verify(save);
    EXPECT_EQ(state::differences(save, folder + "in_place"), std::vector<std::string>{});
  }
  EXPECT_EQ(testing::bytes_of(folder + "in_place/rank-00000.safetensors"),
            testing::bytes_of(disk / "disk/rank-00000.safetensors"));
}

// The system copies into one file at a time, but into several at once: a rank with enough to write,
// which waits, writes as many as torch has threads.
class ShardOfSeveralFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!memory.is_there()) GTEST_SKIP() << "no room in /dev/shm";
    at::set_num_threads(2);
  }
  void TearDown() override { at::set_num_threads(threads); }
  std::vector<std::string> files_of(const std::string& save) const {
    return state::files_below(memory.path() + "/" + save);
  }

  const int threads = at::get_num_threads();
  const testing::FolderInMemory memory{kThreeSaves};
  // 44 MiB with moments; 22 and more in the first tensors.
  Trained run{false, {9, 1'900'000, 5, 900'000, 1'000'001, 3}};
};

TEST_F(ShardOfSeveralFiles, IsThatOfOne) {
  const TempFolder disk;
  run.engine->save(disk.path(), {.name = "one"});
  run.engine->save(memory.path(), {.name = "two", .own = {{"cursor", "7"}}});
  EXPECT_EQ(files_of("two"), (std::vector<std::string>{"manifest.json", "rank-00000-1.safetensors",
                                                       "rank-00000.safetensors"}));
  const auto save = memory.path() + "/two";
  state::verify(save);
  EXPECT_EQ(state::differences(save, disk / "one"), std::vector<std::string>{});
  for (const auto* name : {"/rank-00000.safetensors", "/rank-00000-1.safetensors"}) {
    EXPECT_GT(state::InputFile(save + name).size(), std::uint64_t{16} << 20) << name;
  }
  Trained other(true, {9, 1'900'000, 5, 900'000, 1'000'001, 3});
  other.step();
  EXPECT_EQ(other.engine->load(save).own.at("cursor"), "7");
  run.step();
  other.step();
  for (std::size_t i = 0; i < run.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(run.weights[i], other.weights[i])) << i;
  }
}

TEST_F(ShardOfSeveralFiles, IsOneOfAFewBytesAndOfOneThread) {
  Trained few(false);
  few.engine->save(memory.path(), {.name = "few"});
  at::set_num_threads(1);
  run.engine->save(memory.path(), {.name = "one_thread"});
  for (const auto* save : {"few", "one_thread"}) {
    EXPECT_EQ(files_of(save),
              (std::vector<std::string>{"manifest.json", "rank-00000.safetensors"}));
  }
}

// The larger one of the two: either may be the one that fails, the other is still being written.
TEST_F(ShardOfSeveralFiles, OneThatFailsIsNoSave) {
  const auto before = run.engine->save(memory.path());
  const auto size = state::InputFile(before + "/rank-00000.safetensors").size();
  const auto other = state::InputFile(before + "/rank-00000-1.safetensors").size();
  ASSERT_NE(size, other);
  run.step();
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{std::max(size, other) - 1, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const auto message = testing::message_of([&] { run.engine->save(memory.path()); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("[state] cannot write"), std::string::npos) << message;
  EXPECT_NE(message.find(size > other ? "rank-00000.safetensors" : "rank-00000-1.safetensors"),
            std::string::npos)
      << message;
  EXPECT_EQ(state::list(memory.path()), std::vector<std::string>{before});
  state::verify(run.engine->save(memory.path()));
}

TEST(Shard, IsCopiedFromAnywhereToAnywhere) {
  std::string from(3000, '\0');
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + i / 256);
  for (const std::size_t to_at : {0, 1, 15, 63, 64}) {
    for (const std::size_t from_at : {0, 3, 64}) {
      for (const std::size_t size : {0, 1, 63, 64, 65, 130, 2900}) {
        std::string to(3100, 'x');
        state::copy_past_caches(to.data() + to_at, from.data() + from_at, size);
        EXPECT_EQ(to, std::string(to_at, 'x') + from.substr(from_at, size) +
                          std::string(to.size() - to_at - size, 'x'));
      }
    }
  }
}

// Ctrl-C while values are written from where they lie, and may change from then on: no save.
TEST(Shard, ThatIsInterruptedIsNoSave) {
  const testing::FolderInMemory memory(kSmallSaves);
  if (!memory.is_there()) GTEST_SKIP() << "no room in /dev/shm";
  Trained run(false);
  run.engine->save(memory.path());
  run.step();
  Stream::set_test_delay(3, 400'000);  // waits look for Ctrl-C every 50 ms
  static std::atomic<bool> pressed;
  pressed = true;
  auto* const before = set_interrupt_check([] {
    if (pressed.exchange(false)) throw Interrupted{2};
  });
  EXPECT_THROW(run.engine->save(memory.path()), Interrupted);
  set_interrupt_check(before);
  Stream::set_test_delay(0, 0);
  run.step();
  run.engine->finish_save();
  EXPECT_EQ(state::list(memory.path()).size(), 1u);
  const auto made = run.engine->save(memory.path());
  state::verify(made);
  EXPECT_EQ(state::names_in(memory.path()),
            (std::vector<std::string>{".lock", "latest", "update-00000001", "update-00000003"}));
}

}  // namespace
}  // namespace poise
