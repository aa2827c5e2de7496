// The file store against plain memory: any ranges in any order, every way of input and output, with
// random delays; rooms and descriptors are given back, nothing stays on the disk.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "offload/settings.h"

namespace poise::offload {
namespace {

using config::OffloadIo;

int entries_of(const std::string& path) {
  DIR* directory = opendir(path.c_str());
  int count = 0;
  while (directory != nullptr && readdir(directory) != nullptr) ++count;
  if (directory != nullptr) closedir(directory);
  return count - 2;  // . and ..
}

struct Way {
  std::string name;
  OffloadIo io;
  std::int64_t depth, block;
};

class AnyWay : public ::testing::TestWithParam<Way> {};

TEST_P(AnyWay, SpansHoldWhatPlainMemoryWouldHold) {
  const auto& way = GetParam();
  TempFolder folder;
  auto policy = policy_in(folder.path(), way.io);
  policy.queue_depth = way.depth;
  policy.block_bytes = way.block;
  const auto store = open_store(policy);
  std::mt19937 random(7);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
  struct Pair {
    SpanPtr span;
    at::Tensor plain;
  };
  std::vector<Pair> pairs;
  for (const std::int64_t numel : {1, 1023, 1024, 1025, 4096, 20011}) {
    pairs.push_back({store->reserve(numel, at::kFloat), at::zeros({numel}, at::kFloat)});
  }
  struct Expected {
    Event event;
    at::Tensor got, wanted;
  };
  std::vector<Expected> fetched;
  Stream::set_test_delay(11, 50);
  for (int i = 0; i < 400; ++i) {
    auto& [span, plain] = pairs[static_cast<std::size_t>(below(static_cast<int>(pairs.size())))];
    const auto begin = below(plain.numel());
    const auto count = 1 + below(plain.numel() - begin);
    if (below(2) == 0) {
      const auto values = random_floats(count, static_cast<std::uint64_t>(i));
      plain.narrow(0, begin, count).copy_(values);
      span->put(begin, values);
    } else {
      const auto to = at::empty({count}, at::kFloat);
      fetched.push_back({span->fetch(begin, to), to, plain.narrow(0, begin, count).clone()});
    }
  }
  for (std::size_t i = 0; i < fetched.size(); ++i) {
    fetched[i].event.wait();
    ASSERT_TRUE(at::equal(fetched[i].got, fetched[i].wanted)) << "fetch " << i;
  }
  Stream::set_test_delay(0, 0);
  EXPECT_EQ(entries_of(folder.path()), 0) << "the file has no name";
}

INSTANTIATE_TEST_SUITE_P(Io, AnyWay,
                         ::testing::Values(Way{"ring", OffloadIo::automatic, 8, 4096},
                                           Way{"ring_deep", OffloadIo::automatic, 32, 16384},
                                           Way{"threads", OffloadIo::threads, 4, 8192},
                                           Way{"one", OffloadIo::threads, 1, 65536}),
                         [](const auto& info) { return info.param.name; });

// Whole blocks of page-aligned memory go without a copy, the rest through buffers.
TEST(FileStore, MemoryMayStartAnywhere) {
  TempFolder folder;
  const auto memory = host_memory();
  const auto store = open_store(policy_in(folder.path()));
  constexpr std::int64_t kNumel = 3 * 2048 + 77;  // blocks of 2,048 floats, and a part of one
  const auto values = random_floats(kNumel, 8);
  for (const std::int64_t shift : {0, 1, 1024}) {
    for (const std::int64_t begin : {0, 5, 2048}) {
      const auto room = memory->allocate(kNumel + shift, at::kFloat);
      const auto from = room.narrow(0, shift, kNumel);
      from.copy_(values);
      const auto span = store->reserve(begin + kNumel, at::kFloat);
      span->put(begin, from).wait();
      from.zero_();
      span->fetch(begin, from).wait();
      EXPECT_TRUE(at::equal(from, values)) << shift << ' ' << begin;
    }
  }
}

TEST(FileStore, GivesRoomAndDescriptorsBack) {
  TempFolder folder;
  const auto descriptors = entries_of("/proc/self/fd");
  {
    const auto store = open_store(policy_in(folder.path()));
    const auto open = entries_of("/proc/self/fd");
    const auto values = random_floats(5000, 1);
    for (int i = 0; i < 1000; ++i) {
      const auto span = store->reserve(5000, at::kFloat);
      span->put(0, values);
      if (i % 100 == 0) {
        auto back = at::empty({5000}, at::kFloat);
        span->fetch(0, back).wait();
        ASSERT_TRUE(at::equal(back, values)) << i;
      }
    }
    EXPECT_EQ(entries_of("/proc/self/fd"), open);
    EXPECT_LT(store->file().bytes(), 1000 * 20480 / 2) << "rooms are used again";
  }
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries_of(folder.path()), 0);
}

TEST(FileStore, ARoomThatIsUsedAgainReadsAsZero) {
  TempFolder folder;
  const auto store = open_store(policy_in(folder.path()));
  store->reserve(100, at::kFloat)->write(0, random_floats(100, 1));
  auto back = at::empty({100}, at::kFloat);
  store->reserve(100, at::kFloat)->read(0, back);
  EXPECT_EQ(back.abs().sum().item<float>(), 0);
}

TEST(FileStore, BuffersAreTheBytesThatAreDocumented) {
  TempFolder folder;
  const auto memory = host_memory();
  const auto policy = policy_in(folder.path());
  const auto store = file_store(policy, memory);
  EXPECT_EQ(memory->bytes(), 2 * policy.queue_depth * policy.block_bytes);
  const auto span = store->reserve(100000, at::kFloat);
  span->write(0, random_floats(100000, 1));
  EXPECT_EQ(memory->peak_bytes(), 2 * policy.queue_depth * policy.block_bytes);
}

TEST(FileStore, MakesItsFolderAndClearsWhatADeadRunLeft) {
  TempFolder folder;
  const auto path = folder / "deep/er";
  open_store(policy_in(path));
  const auto dead = path + "/poise-offload-1-2-3.tmp", held = path + "/poise-offload-4-5-6.tmp";
  const auto other = path + "/notes.txt";
  for (const auto& name : {dead, held, other}) std::ofstream(name) << "bytes";
  ASSERT_EQ(symlink(other.c_str(), (path + "/poise-offload-link.tmp").c_str()), 0);
  const int living = open(held.c_str(), O_RDONLY);
  ASSERT_EQ(flock(living, LOCK_EX), 0);  // as another process would: a lock of another description
  open_store(policy_in(path));
  EXPECT_NE(access(dead.c_str(), F_OK), 0);
  EXPECT_EQ(access(held.c_str(), F_OK), 0) << "somebody still has it";
  EXPECT_EQ(access(other.c_str(), F_OK), 0) << "not ours";
  close(living);
}

TEST(FileStore, WorksWhereFilesNeedAName) {
  TempFolder folder;
  const auto store = open_store(policy_in(folder.path()), ScratchFile::Name::taken_away);
  EXPECT_EQ(entries_of(folder.path()), 0) << "the name is gone at once";
  const auto values = random_floats(5000, 4);
  const auto span = store->reserve(5000, at::kFloat);
  span->write(0, values);
  auto back = at::empty({5000}, at::kFloat);
  span->read(0, back);
  EXPECT_TRUE(at::equal(back, values));
}

}  // namespace
}  // namespace poise::offload
