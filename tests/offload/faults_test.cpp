// What the system can answer to a read or a write, by a stand-in that answers it, and files that
// change behind the store's back. Every outcome is an Error that names file and offset, or right.
#include <ATen/ops/equal.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <deque>

#include "offload/settings.h"

namespace poise::offload {
namespace {

using ::testing::Test;

// Does what it is asked, except where the script says otherwise.
class Scripted final : public BlockIo {
 public:
  // Of request number i (from 0): a negative errno, or the most bytes that move.
  using Script = std::function<std::int64_t(int i, const BlockRequest&)>;
  static constexpr std::int64_t kAll = 1 << 30;

  explicit Scripted(Script script) : script_(std::move(script)) {}
  void start(const BlockRequest& r) override {
    auto result = script_(next_++, r);
    if (result > 0) {
      const auto bytes = static_cast<std::size_t>(std::min(result, r.bytes));
      result = r.write ? pwrite(r.file, r.data, bytes, r.offset)
                       : pread(r.file, r.data, bytes, r.offset);
    }
    results_.push_back({r.buffer, result});
  }
  BlockResult wait() override {
    const auto result = results_.back();  // not in the order they were started
    results_.pop_back();
    return result;
  }
  const char* name() const override { return "scripted"; }

 private:
  Script script_;
  int next_ = 0;
  std::deque<BlockResult> results_;
};

std::shared_ptr<FileStore> scripted(const TempFolder& folder, Scripted::Script script) {
  return std::make_shared<FileStore>(
      policy_in(folder.path()), *host_memory(),
      [script](const std::vector<iovec>&) { return std::make_unique<Scripted>(script); });
}

constexpr std::int64_t kNumel = 20000;  // 80,000 bytes: ten blocks of 8,192, the last one short

std::string failure_of_round_trip(const Scripted::Script& script) {
  TempFolder folder;
  const auto store = scripted(folder, script);
  const auto span = store->reserve(kNumel, at::kFloat);
  const auto values = random_floats(kNumel, 1);
  return message_of([&] {
    span->put(0, values).wait();
    auto back = at::empty({kNumel}, at::kFloat);
    span->fetch(0, back).wait();
    EXPECT_TRUE(at::equal(back, values));
  });
}

bool fails(int i) { return i == 4; }

TEST(Faults, AFailedWriteNamesFileOffsetAndReason) {
  const auto message = failure_of_round_trip(
      [](int i, const BlockRequest& r) { return r.write && fails(i) ? -EIO : Scripted::kAll; });
  EXPECT_NE(
      message.find("[offload] cannot write 8192 bytes at offset 32768 of the unnamed file in "),
      std::string::npos)
      << message;
  EXPECT_NE(message.find("Input/output error; look at the disk"), std::string::npos) << message;
}

TEST(Faults, AFailedReadToo) {
  const auto message = failure_of_round_trip(
      [](int i, const BlockRequest& r) { return !r.write && fails(i) ? -EIO : Scripted::kAll; });
  EXPECT_NE(message.find("[offload] cannot read 8192 bytes at offset 32768"), std::string::npos)
      << message;
}

TEST(Faults, AFullDiskSaysWhatToDo) {
  const auto message = failure_of_round_trip(
      [](int i, const BlockRequest& r) { return r.write && fails(i) ? -ENOSPC : Scripted::kAll; });
  EXPECT_NE(message.find("No space left on device; free some room"), std::string::npos) << message;
}

TEST(Faults, ShortTransfersAreContinued) {
  EXPECT_EQ(failure_of_round_trip([](int, const BlockRequest&) { return kSector; }), "");
}

TEST(Faults, AShortWriteThatMovesNothingMoreIsAnError) {
  const auto message = failure_of_round_trip([](int i, const BlockRequest& r) -> std::int64_t {
    if (!r.write || i < 4) return Scripted::kAll;
    return i == 4 ? kSector : 0;
  });
  EXPECT_NE(message.find("the system took only 4096"), std::string::npos) << message;
}

TEST(Faults, InterruptedRequestsAreMadeAgain) {
  EXPECT_EQ(failure_of_round_trip([](int i, const BlockRequest&) -> std::int64_t {
              return i % 3 == 0 ? -EINTR : i % 3 == 1 ? -EAGAIN : Scripted::kAll;
            }),
            "");
}

TEST(Faults, ButNotForEver) {
  const auto message =
      failure_of_round_trip([](int, const BlockRequest&) -> std::int64_t { return -EAGAIN; });
  EXPECT_NE(message.find("Resource temporarily unavailable"), std::string::npos) << message;
}

TEST(Faults, WhereODirectIsRefusedThePageCacheServes) {
  EXPECT_EQ(failure_of_round_trip([](int, const BlockRequest& r) -> std::int64_t {
              return (fcntl(r.file, F_GETFL) & O_DIRECT) != 0 ? -EINVAL : Scripted::kAll;
            }),
            "");
}

TEST(Faults, AfterAFailureNothingSucceedsSilently) {
  TempFolder folder;
  const auto store = scripted(folder, [](int, const BlockRequest& r) -> std::int64_t {
    return r.write ? -EIO : Scripted::kAll;
  });
  const auto one = store->reserve(kNumel, at::kFloat), other = store->reserve(10, at::kFloat);
  one->put(0, random_floats(kNumel, 1));
  auto back = at::empty({kNumel}, at::kFloat);
  EXPECT_NE(message_of([&] { one->fetch(0, back).wait(); }).find("cannot write"), std::string::npos)
      << "a fetch of what could not be put";
  EXPECT_NE(message_of([&] { other->put(0, random_floats(10, 2)).wait(); }).find("cannot write"),
            std::string::npos);
}

// A fault that passes: what was lost says so until it is written anew, and all else works.
TEST(Faults, AfterOneThatPassedWhatIsWrittenAnewIsRight) {
  TempFolder folder;
  auto broken = std::make_shared<std::atomic<bool>>(false);
  const auto store = scripted(folder, [broken](int i, const BlockRequest& r) -> std::int64_t {
    return r.write && *broken && i % 2 == 1 ? -ENOSPC : Scripted::kAll;
  });
  const auto one = store->reserve(kNumel, at::kFloat), other = store->reserve(kNumel, at::kFloat);
  const auto kept = random_floats(kNumel, 3), fresh = random_floats(kNumel, 4);
  auto back = at::empty({kNumel}, at::kFloat);
  for (int round = 0; round < 3; ++round) {  // by each of the lanes
    other->put(0, kept).wait();
    one->put(0, random_floats(kNumel, 1)).wait();
    *broken = true;
    EXPECT_NE(message_of([&] { one->put(0, random_floats(kNumel, 2)).wait(); }).find("No space"),
              std::string::npos);
    *broken = false;
    for (int times = 0; times < 3; ++times) {
      EXPECT_NE(message_of([&] { one->fetch(0, back).wait(); }), "");
      EXPECT_NE(message_of([&] { one->put(100, random_floats(10, 2)).wait(); }), "")
          << "a part of a block of which the rest is lost";
      back.zero_();
      other->fetch(0, back).wait();
      EXPECT_TRUE(at::equal(back, kept));
    }
    one->put(0, fresh).wait();
    one->fetch(0, back).wait();
    EXPECT_TRUE(at::equal(back, fresh));
  }
}

TEST(Faults, AfterAReadThatFailedTheNextOneIsRight) {
  TempFolder folder;
  auto broken = std::make_shared<std::atomic<bool>>(false);
  const auto store = scripted(folder, [broken](int, const BlockRequest& r) -> std::int64_t {
    return !r.write && *broken ? -EIO : Scripted::kAll;
  });
  const auto span = store->reserve(kNumel, at::kFloat);
  const auto values = random_floats(kNumel, 1), fresh = random_floats(kNumel, 2);
  auto back = at::empty({kNumel}, at::kFloat);
  for (int round = 0; round < 3; ++round) {
    span->put(0, values).wait();
    *broken = true;
    EXPECT_NE(message_of([&] { span->fetch(0, back).wait(); }).find("cannot read"),
              std::string::npos);
    *broken = false;
    span->fetch(0, back).wait();
    EXPECT_TRUE(at::equal(back, values));
    span->put(0, fresh).wait();
    span->fetch(0, back).wait();
    EXPECT_TRUE(at::equal(back, fresh));
  }
}

struct Round {
  TempFolder folder;
  std::shared_ptr<FileStore> store = open_store(policy_in(folder.path()));
  SpanPtr span = store->reserve(kNumel, at::kFloat);
  at::Tensor back = at::empty({kNumel}, at::kFloat);
  // The same file by another descriptor, as somebody else would have it.
  int other = open(join("/proc/self/fd/", store->file().descriptor()).c_str(), O_RDWR);

  Round() { span->put(0, random_floats(kNumel, 1)).wait(); }
  ~Round() { close(other); }
  std::string message() {
    return message_of([&] { span->fetch(0, back).wait(); });
  }
};

TEST(Faults, AFileThatWasCutShortIsAnError) {
  Round round;
  ASSERT_EQ(ftruncate(round.other, 73728), 0);
  const auto message = round.message();
  EXPECT_NE(message.find("cannot read 8192 bytes at offset 73728"), std::string::npos) << message;
  EXPECT_NE(message.find("the file was cut short"), std::string::npos) << message;
}

TEST(Faults, SoIsOneThatWasCutAndGrownAgain) {
  Round round;
  ASSERT_EQ(ftruncate(round.other, 0), 0);
  ASSERT_EQ(ftruncate(round.other, 81920), 0);
  EXPECT_NE(round.message().find("are not those that were written"), std::string::npos);
}

TEST(Faults, SoIsOneChangedByte) {
  Round round;
  char byte = 0;
  ASSERT_EQ(pread(round.other, &byte, 1, 50000), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(pwrite(round.other, &byte, 1, 50000), 1);
  fsync(round.other);
  const auto message = round.message();
  EXPECT_NE(message.find("8192 bytes at offset 49152"), std::string::npos) << message;
  EXPECT_NE(message.find("are not those that were written"), std::string::npos) << message;
}

// What was right once, elsewhere or before.
TEST(Faults, SoAreBlocksThatChangedPlaces) {
  Round round;
  std::vector<char> first(8192), second(8192);
  ASSERT_EQ(pread(round.other, first.data(), 8192, 8192), 8192);
  ASSERT_EQ(pread(round.other, second.data(), 8192, 16384), 8192);
  ASSERT_EQ(pwrite(round.other, second.data(), 8192, 8192), 8192);
  ASSERT_EQ(pwrite(round.other, first.data(), 8192, 16384), 8192);
  fsync(round.other);
  EXPECT_NE(round.message().find("are not those that were written"), std::string::npos);
}

TEST(Faults, SoIsAFileOfAnEarlierUpdate) {
  Round round;
  std::vector<char> before(81920);
  ASSERT_EQ(pread(round.other, before.data(), before.size(), 0), 81920);
  round.span->put(0, random_floats(kNumel, 2)).wait();
  ASSERT_EQ(pwrite(round.other, before.data(), before.size(), 0), 81920);
  fsync(round.other);
  EXPECT_NE(round.message().find("are not those that were written"), std::string::npos);
}

}  // namespace
}  // namespace poise::offload
