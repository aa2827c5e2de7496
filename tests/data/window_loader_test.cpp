// WindowLoader: reading ahead changes nothing, cursors resume, errors and forks are survived.
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "poise/data.h"
#include "poise/interrupt.h"
#include "support/temp_folder.h"

namespace poise::data {
namespace {

using testing::message_of;
using testing::TempFolder;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Indices = std::vector<std::int64_t>;

// Each sample is its own index; what was read is recorded.
class Numbers : public Source {
 public:
  explicit Numbers(std::int64_t n) : n_(n) {}
  std::int64_t size() const override { return n_; }
  Batch batch(const Indices& indices) const override {
    const auto pause = delay.load();
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    std::lock_guard lock(mutex_);
    for (const std::int64_t i : indices) {
      if (i == bad) throw std::range_error("sample is broken");
      read_.push_back(i);
    }
    return {at::tensor(indices, at::kLong), at::tensor(indices, at::kLong)};
  }
  Indices read() const {
    std::lock_guard lock(mutex_);
    return read_;
  }
  std::atomic<std::int64_t> bad{-1};
  std::atomic<std::chrono::milliseconds> delay{std::chrono::milliseconds(0)};

 private:
  std::int64_t n_;
  mutable std::mutex mutex_;
  mutable Indices read_;
};

Indices values_of(const Batch& batch) {
  const auto* data = batch.inputs.const_data_ptr<std::int64_t>();
  return {data, data + batch.inputs.numel()};
}

// One list of indices per micro-batch, for every window until the end.
std::vector<std::vector<Indices>> drain(WindowLoader& loader) {
  std::vector<std::vector<Indices>> windows;
  while (auto window = loader.next()) {
    auto& lists = windows.emplace_back();
    for (const Batch& batch : *window) lists.push_back(values_of(batch));
  }
  return windows;
}

WindowOptions options(std::int64_t prefetch, std::int64_t epochs = 2) {
  return {.micro_batch_size = 2, .accumulation = 3, .prefetch = prefetch, .epochs = epochs};
}

TEST(WindowLoader, CutsContiguousMicroBatchesAndAShortTail) {
  WindowLoader loader(std::make_shared<Numbers>(9), {.order = Order::sequential}, options(0, 1));
  EXPECT_EQ(loader.window_samples(), 6);
  EXPECT_THAT(drain(loader), ElementsAre(ElementsAre(Indices{0, 1}, Indices{2, 3}, Indices{4, 5}),
                                         ElementsAre(Indices{6, 7}, Indices{8})));
  EXPECT_FALSE(loader.next());
}

TEST(WindowLoader, ReadingAheadGivesTheSameWindowsAndCursors) {
  for (const Tail tail : {Tail::short_window, Tail::next_epoch}) {
    for (const std::int64_t ranks : {1, 2}) {
      const SamplerOptions sampling{.seed = 3, .tail = tail, .ranks = ranks, .rank = ranks - 1};
      const auto source = std::make_shared<Numbers>(31);
      WindowLoader plain(source, sampling, options(0));
      WindowLoader ahead(source, sampling, options(3));
      while (true) {
        EXPECT_EQ(plain.cursor(), ahead.cursor());
        auto expected = plain.next();
        auto got = ahead.next();
        ASSERT_EQ(expected.has_value(), got.has_value());
        if (!expected) break;
        ASSERT_EQ(expected->size(), got->size());
        for (std::size_t i = 0; i < got->size(); ++i) {
          EXPECT_TRUE(at::equal((*expected)[i].inputs, (*got)[i].inputs));
        }
      }
      EXPECT_EQ(plain.cursor(), 62);
    }
  }
}

TEST(WindowLoader, ResumesAtEveryWindowReadingNothingSkipped) {
  WindowLoader unbroken(std::make_shared<Numbers>(20), {}, options(2));
  std::vector<std::int64_t> cursors;
  for (auto& window : unbroken) {
    (void)window;
    cursors.push_back(unbroken.cursor());
  }
  ASSERT_EQ(cursors, (Indices{6, 12, 18, 20, 26, 32, 38, 40}));
  WindowLoader again(std::make_shared<Numbers>(20), {}, options(0));
  const auto all = drain(again);
  for (std::size_t done = 1; done < all.size(); ++done) {
    const auto source = std::make_shared<Numbers>(20);
    WindowLoader resumed(source, {}, options(2));
    resumed.seek(cursors[done - 1]);
    EXPECT_EQ(drain(resumed),
              decltype(all)(all.begin() + static_cast<std::ptrdiff_t>(done), all.end()));
    EXPECT_EQ(source->read().size(), static_cast<std::size_t>(40 - cursors[done - 1]));
  }
}

TEST(WindowLoader, SeekForgetsWhatWasReadAhead) {
  WindowLoader loader(std::make_shared<Numbers>(100), {.order = Order::sequential}, options(3));
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{0, 1}));
  EXPECT_EQ(loader.cursor(), 6) << "windows read ahead do not count";
  loader.seek(50);
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{50, 51}));
  loader.seek(0);
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{0, 1}));
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{6, 7}));
  EXPECT_THAT(message_of([&] { loader.seek(-3); }), HasSubstr("cursor is -3"));
}

TEST(WindowLoader, WindowsMayGrow) {
  for (const std::int64_t prefetch : {0, 3}) {
    WindowLoader loader(std::make_shared<Numbers>(60), {.order = Order::sequential},
                        options(prefetch, 1));
    std::vector<std::int64_t> begins, sizes;
    for (const std::int64_t micro_batches : {1, 1, 2, 3, 3, 5}) {
      loader.set_accumulation(micro_batches);
      EXPECT_EQ(loader.window_samples(), 2 * micro_batches);
      const auto window = *loader.next();
      begins.push_back(values_of(window[0])[0]);
      sizes.push_back(static_cast<std::int64_t>(window.size()));
    }
    EXPECT_EQ(begins, (Indices{0, 2, 4, 8, 14, 20})) << prefetch;
    EXPECT_EQ(sizes, (Indices{1, 1, 2, 3, 3, 5}));
    EXPECT_EQ(loader.cursor(), 30);
    EXPECT_THAT(message_of([&] { loader.set_accumulation(0); }), HasSubstr("accumulation is 0"));
  }
}

TEST(WindowLoader, ReadsAheadButNoFurtherThanAsked) {
  const auto source = std::make_shared<Numbers>(600);
  WindowLoader loader(source, {.order = Order::sequential}, options(3, 1));
  EXPECT_TRUE(source->read().empty()) << "nothing is read before the first window is wanted";
  loader.next();
  for (int wait = 0; wait < 500 && source->read().size() < 24; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(source->read().size(), 24u) << "one handed out and three ahead, 6 samples each";
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(source->read().size(), 24u);
}

TEST(WindowLoader, ErrorsComeFromTheNextThatMeetsThemAndCanBeRetried) {
  for (const std::int64_t prefetch : {0, 3}) {
    const auto source = std::make_shared<Numbers>(60);
    source->bad = 8;
    WindowLoader loader(source, {.order = Order::sequential}, options(prefetch));
    EXPECT_NO_THROW(loader.next());
    EXPECT_THROW(loader.next(), std::range_error) << "the type is kept";
    EXPECT_EQ(loader.cursor(), 6);
    EXPECT_THROW(loader.next(), std::range_error);
    source->bad = -1;
    EXPECT_EQ(values_of((*loader.next())[0]), (Indices{6, 7}));
    EXPECT_EQ(loader.cursor(), 12);
  }
}

// A failure belongs to its window: those before it are whole, and where nobody wants it any more
// nobody hears of it.
TEST(WindowLoader, AFailureAheadIsSeenOnceAndOnlyByItsWindow) {
  const auto source = std::make_shared<Numbers>(60);
  source->bad = 14;  // in the third window, which is read while the first is handed out
  WindowLoader loader(source, {.order = Order::sequential}, options(5));
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{0, 1}));
  for (int wait = 0; wait < 500 && source->read().size() < 30; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // until those after it are read
  }
  source->bad = -1;
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{6, 7}));
  EXPECT_THROW(loader.next(), std::range_error);
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{12, 13}));
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{18, 19}));

  source->bad = 50;
  loader.seek(36);
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{36, 37}));
  loader.seek(0);
  for (std::int64_t first = 0; first < 36; first += 6) {
    EXPECT_EQ(values_of((*loader.next())[0])[0], first);
  }
}

struct Interrupted {};

TEST(WindowLoader, AWaitForAWindowCanBeInterrupted) {
  const auto source = std::make_shared<Numbers>(60);
  source->delay = std::chrono::milliseconds(150);
  WindowLoader loader(source, {.order = Order::sequential}, options(2));
  auto* const before = set_interrupt_check([] { throw Interrupted{}; });
  EXPECT_THROW(loader.next(), Interrupted);
  set_interrupt_check(before);
  source->delay = std::chrono::milliseconds(0);
  EXPECT_EQ(values_of((*loader.next())[0]), (Indices{0, 1})) << "the next call reads it again";
}

TEST(WindowLoader, StopsWithoutReadingTheRest) {
  const auto source = std::make_shared<Numbers>(6000);
  source->delay = std::chrono::milliseconds(2);
  {
    WindowLoader loader(source, {}, options(500));
    loader.next();
  }
  EXPECT_LT(source->read().size(), 600u);
  const auto after = source->read().size();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(source->read().size(), after);
}

TEST(WindowLoader, AForkedChildGoesOnByItself) {
  const auto source = std::make_shared<Numbers>(60);
  source->delay = std::chrono::milliseconds(1);
  auto loader = std::make_unique<WindowLoader>(source, SamplerOptions{.order = Order::sequential},
                                               options(4));
  loader->next();
  // Only while no read is in progress: the child must not inherit this test's own locked mutex.
  while (source->read().size() < 30) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);  // a hang is a failure, not a stuck suite
    const auto window = loader->next();
    const bool right = window && values_of((*window)[0]) == Indices{6, 7};
    loader.reset();
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_EQ(values_of((*loader->next())[0]), (Indices{6, 7})) << "the parent goes on too";
}

TEST(WindowLoader, OfFewerSamplesThanRanksSomeRanksHoldNothing) {
  std::size_t samples = 0;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    WindowLoader loader(std::make_shared<Numbers>(3), {.ranks = 4, .rank = rank}, options(1, 1));
    const auto window = loader.next();
    ASSERT_TRUE(window);
    for (const Batch& batch : *window) samples += values_of(batch).size();
    EXPECT_FALSE(loader.next());
  }
  EXPECT_EQ(samples, 3u);
}

TEST(WindowLoader, BadOptionsAreNamed) {
  const auto open = [](WindowOptions wanted) {
    return message_of([&] { WindowLoader(std::make_shared<Numbers>(3), {}, wanted); });
  };
  EXPECT_THAT(open({.micro_batch_size = 0}), HasSubstr("micro_batch_size is 0"));
  EXPECT_THAT(open({.accumulation = -1}), HasSubstr("accumulation is -1"));
  EXPECT_THAT(open({.prefetch = -1}), HasSubstr("prefetch is -1"));
  EXPECT_THAT(open({.micro_batch_size = INT64_MAX, .accumulation = 2}), HasSubstr("2^63"));
  EXPECT_THAT(message_of([] { WindowLoader(nullptr, {}, {}); }), HasSubstr("no samples"));
}

TEST(WindowLoader, ByteFilesEndToEnd) {
  const TempFolder dir;
  std::string text;
  for (int i = 0; i < 41; ++i) text.push_back(static_cast<char>('0' + i));
  const auto corpus = std::make_shared<ByteCorpus>(
      CorpusOptions{.paths = {dir.write("a", text)}, .sequence_length = 4});
  WindowLoader loader(corpus, {.order = Order::sequential}, options(2, 1));
  Indices seen;
  for (auto& window : loader) {
    for (const Batch& batch : window) {
      for (const std::int64_t value : values_of(batch)) seen.push_back(value);
    }
  }
  Indices expected;
  for (int i = 0; i < 40; ++i) expected.push_back('0' + i);
  EXPECT_EQ(seen, expected);
}

}  // namespace
}  // namespace poise::data
