// Streams on the CPU: order, failures, interrupts, forks, and overlap on against overlap off.
#include "poise/stream.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "poise/error.h"
#include "poise/interrupt.h"
#include "poise/log.h"

namespace poise {
namespace {

using namespace std::chrono_literals;

// A gate that holds a stream until the test opens it.
struct Gate {
  std::promise<void> promise;
  std::shared_future<void> opened = promise.get_future().share();
  Stream::Work work() const {
    return [opened = opened] { opened.wait(); };
  }
  void open() { promise.set_value(); }
};

class DelayGuard {
 public:
  DelayGuard(std::uint64_t seed, std::int64_t most) { Stream::set_test_delay(seed, most); }
  ~DelayGuard() { Stream::set_test_delay(0, 0); }
};

int threads_of_process() {
  int count = 0;
  FILE* tasks = popen(("ls /proc/" + std::to_string(getpid()) + "/task | wc -l").c_str(), "r");
  if (std::fscanf(tasks, "%d", &count) != 1) count = -1;
  pclose(tasks);
  return count;
}

TEST(Event, FreshOneIsOver) {
  Event event;
  EXPECT_TRUE(event.done());
  EXPECT_TRUE(event.wait_for(0ms));
  EXPECT_NO_THROW(event.wait());
}

TEST(Stream, RunsInOrderOnAnotherThread) {
  Stream stream;
  std::vector<int> order;
  std::thread::id worker;
  for (int i = 0; i < 100; ++i) {
    stream.submit([&, i] {
      worker = std::this_thread::get_id();
      order.push_back(i);
    });
  }
  stream.synchronize();
  std::vector<int> want(100);
  std::iota(want.begin(), want.end(), 0);
  EXPECT_EQ(order, want);
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST(Stream, EventIsOverAfterItsOperationNotBefore) {
  Stream stream;
  Gate gate;
  const Event held = stream.submit(gate.work());
  const Event later = stream.submit([] {});
  EXPECT_FALSE(held.done());
  EXPECT_FALSE(later.wait_for(10ms));
  gate.open();
  EXPECT_TRUE(later.wait_for(20s));
  EXPECT_TRUE(held.done());
}

TEST(Stream, WhatTheWorkCapturedIsGoneWhenItIsOver) {
  Stream stream;
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  const Event event = stream.submit([held = std::move(held)] {});
  event.wait();
  EXPECT_TRUE(watch.expired());
}

TEST(Stream, StartsItsThreadLateAndJoinsIt) {
  const int before = threads_of_process();
  {
    Stream idle, used;
    EXPECT_EQ(threads_of_process(), before);
    used.submit([] {}).wait();
    EXPECT_EQ(threads_of_process(), before + 1);
  }
  EXPECT_EQ(threads_of_process(), before);
}

TEST(Stream, DestructorRunsWhatIsQueued) {
  std::atomic<int> ran = 0;
  {
    Stream stream;
    for (int i = 0; i < 50; ++i) stream.submit([&] { ++ran; });
  }
  EXPECT_EQ(ran, 50);
}

TEST(Stream, EventOutlivesIt) {
  Event event;
  {
    Stream stream;
    event = stream.submit([] { throw std::out_of_range("gone"); });
  }
  EXPECT_THROW(event.wait(), std::out_of_range);
}

TEST(Stream, WaitOrdersItAfterAnotherStreamsEvent) {
  Stream producer, consumer;
  Gate gate;
  int value = 0, seen = -1;
  producer.submit(gate.work());
  const Event produced = producer.submit([&] { value = 42; });
  consumer.wait(produced);
  const Event consumed = consumer.submit([&] { seen = value; });
  EXPECT_FALSE(consumed.wait_for(10ms));
  gate.open();
  consumed.wait();
  EXPECT_EQ(seen, 42);
}

TEST(Stream, AFailureKeepsItsTypeAndStopsWhatFollows) {
  Stream stream;
  bool ran = false;
  const Event failed = stream.submit([] { throw std::out_of_range("seven"); });
  const Event later = stream.submit([&] { ran = true; });
  EXPECT_THROW(failed.wait(), std::out_of_range);
  EXPECT_THROW(failed.wait(), std::out_of_range);  // each time
  EXPECT_THROW(later.wait_for(20s), std::out_of_range);
  EXPECT_FALSE(ran);
  EXPECT_THROW(stream.synchronize(), std::out_of_range);
  EXPECT_NO_THROW(stream.synchronize());  // once
  EXPECT_NO_THROW(stream.submit([&] { ran = true; }).wait());
  EXPECT_TRUE(ran);
}

TEST(Stream, AFailureTravelsToTheStreamThatWaited) {
  Stream producer, consumer;
  bool ran = false;
  consumer.wait(producer.submit([] { throw std::out_of_range("seven"); }));
  const Event consumed = consumer.submit([&] { ran = true; });
  EXPECT_THROW(consumed.wait(), std::out_of_range);
  EXPECT_FALSE(ran);
}

TEST(Stream, SaysAFailureThatNobodyWaitedFor) {
  std::vector<std::string> lines;
  const auto old =
      log::set_sink([&](log::Level, const std::string& line) { lines.push_back(line); });
  {
    Stream quiet;
    EXPECT_THROW(quiet.submit([] { throw std::runtime_error("heard"); }).wait(),
                 std::runtime_error);
    Stream loud;
    loud.submit([] { throw std::runtime_error("unheard"); });
  }
  log::set_sink(old);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("unheard"), std::string::npos);
}

TEST(Stream, CarriesTheSubmittersContextAroundTheWork) {
  static thread_local int place = 0;
  struct Restore {
    int old;
    explicit Restore(int wanted) : old(std::exchange(place, wanted)) {}
    ~Restore() { place = old; }
  };
  Stream stream(c10::Device(c10::DeviceType::CPU), [] {
    return
        [wanted = place]() -> std::shared_ptr<void> { return std::make_shared<Restore>(wanted); };
  });
  std::vector<int> seen;
  Gate gate;
  stream.submit(gate.work());
  for (int i : {3, 5}) {
    place = i;
    stream.submit([&] { seen.push_back(place); });
  }
  place = 0;
  gate.open();
  stream.synchronize();
  EXPECT_EQ(seen, (std::vector<int>{3, 5}));
}

TEST(Stream, RefusesADeviceItCannotHave) {
  EXPECT_THROW(Stream(c10::Device(c10::DeviceType::XPU)), Error);
  EXPECT_THROW(Stream(c10::Device(c10::DeviceType::CUDA, 99)), Error);
}

std::atomic<bool> interrupted{false};
std::atomic<int> checks{0};

TEST(Interrupt, EndsAWaitAndLeavesTheStreamUsable) {
  Stream stream;
  Gate gate;
  auto* old = set_interrupt_check([] {
    ++checks;
    if (interrupted) throw std::domain_error("Ctrl-C");
  });
  const Event held = stream.submit(gate.work());
  EXPECT_FALSE(held.wait_for(180ms));
  EXPECT_GE(checks, 2);
  interrupted = true;
  EXPECT_THROW(held.wait(), std::domain_error);
  EXPECT_THROW(stream.synchronize(), std::domain_error);
  set_interrupt_check(old);
  gate.open();
  EXPECT_NO_THROW(stream.synchronize());
}

TEST(Stream, AForkedChildStartsAnew) {
  Stream stream;
  Gate gate;
  const Event held = stream.submit(gate.work());  // the fork happens while the worker is busy
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a hang ends in a signal
    bool right = false;
    try {
      held.wait();
    } catch (const Error&) {
      right = true;
    }
    int ran = 0;
    stream.submit([&] { ++ran; }).wait();
    stream.synchronize();
    right = right && ran == 1;
    {
      Stream own;
      own.submit([&] { ++ran; });
    }
    _exit(right && ran == 2 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  gate.open();
  stream.synchronize();
}

TEST(Stream, AForkedChildMayDropItUnused) {
  auto stream = std::make_unique<Stream>();
  Gate gate;
  stream->submit(gate.work());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    stream.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  gate.open();
}

TEST(TestDelay, PausesBeforeOperations) {
  DelayGuard delay(1, 2000);
  Stream stream;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) stream.submit([] {});
  stream.synchronize();
  // 51 pauses of 1 ms on average; the sequence of a seed is fixed, and sleeps are never short.
  EXPECT_GE(std::chrono::steady_clock::now() - start, 25ms);
}

// A chain of units as the runtime overlaps it: fetch ahead on one stream, reduce behind on another,
// two buffers taken in turn. Returns every intermediate, so that a missing wait shows.
std::vector<double> pipeline(bool overlap) {
  constexpr int kUnits = 12, kWidth = 64;
  std::vector<std::vector<double>> stored(kUnits, std::vector<double>(kWidth));
  std::mt19937 random(3);
  for (auto& unit : stored) {
    for (double& x : unit) x = random() % 1000 / 997.0;
  }
  std::vector<double> buffers[2] = {std::vector<double>(kWidth), std::vector<double>(kWidth)};
  std::vector<double> sums(kUnits);
  Stream fetch, reduce;
  Event fetched[2], reduced[2];
  double carry = 1;
  const auto fetch_unit = [&](int unit) {
    const int slot = unit % 2;
    fetch.wait(reduced[slot]);  // the buffer is read until then
    fetched[slot] = fetch.submit([&, unit, slot] { buffers[slot] = stored[unit]; });
    if (!overlap) fetched[slot].wait();
  };
  fetch_unit(0);
  for (int unit = 0; unit < kUnits; ++unit) {
    const int slot = unit % 2;
    if (unit + 1 < kUnits) fetch_unit(unit + 1);
    fetched[slot].wait();
    for (double& x : buffers[slot]) carry = x = x * carry + 1 / (carry + 2);
    reduced[slot] = reduce.submit([&, unit, slot] {
      sums[unit] = std::accumulate(buffers[slot].begin(), buffers[slot].end(), 0.0);
    });
    if (!overlap) reduced[slot].wait();
  }
  reduce.synchronize();
  fetch.synchronize();
  sums.push_back(carry);
  return sums;
}

TEST(TestDelay, OverlapOnEqualsOverlapOffToTheBit) {
  const std::vector<double> want = pipeline(false);
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    DelayGuard delay(seed, 400);
    ASSERT_EQ(pipeline(true), want) << "seed " << seed;
  }
}

}  // namespace
}  // namespace poise
