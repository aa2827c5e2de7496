// The faces of Stream and Event, and the test switch.
#include "poise/stream.h"

#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>

#include "core/stream_backend.h"
#include "poise/error.h"

namespace poise {
namespace {

// Process-wide: a test wants every stream delayed, also those inside rooms it cannot reach.
struct TestDelay {
  std::atomic<std::uint64_t> state{0};
  std::atomic<std::int64_t> max_microseconds{0};

  TestDelay() {
    if (const char* text = std::getenv("POISE_STREAM_DELAY")) {
      char* end = nullptr;
      const long long wanted = std::strtoll(text, &end, 10);
      if (end == text || *end != '\0' || wanted < 0) {
        fail("core", "POISE_STREAM_DELAY is not a number of microseconds: \"", text,
             "\"; set it to 0 or more, or unset it");
      }
      max_microseconds = wanted;
    }
  }
};
TestDelay& test_delay() {
  static TestDelay one;
  return one;
}

// SplitMix64: the sequence is a counter's, so that threads may share it.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::unique_ptr<StreamBackend> make_backend(c10::Device device) {
  if (device.is_cpu()) return make_cpu_stream();
  if (device.is_cuda()) return make_cuda_stream(device);
  fail("core", "no streams for device: ", device.str(), "; use cpu or cuda");
}

}  // namespace

void pause_for_test() {
  TestDelay& delay = test_delay();
  const std::int64_t most = delay.max_microseconds.load(std::memory_order_relaxed);
  if (most <= 0) return;
  const std::uint64_t random = mixed(delay.state.fetch_add(0x9e3779b97f4a7c15u));
  std::this_thread::sleep_for(
      std::chrono::microseconds(random % (static_cast<std::uint64_t>(most) + 1)));
}

bool Event::done() const { return !state_ || state_->done(); }

void Event::wait() const {
  if (state_) state_->order_current();
}

void Event::synchronize() const {
  if (state_) state_->block(std::nullopt);
}

void Event::synchronize_on_worker() const {
  if (state_) state_->block_worker();
}

bool Event::wait_for(std::chrono::milliseconds timeout) const {
  return !state_ || state_->block(std::chrono::steady_clock::now() + timeout);
}

Stream::Stream(c10::Device device, Capture capture)
    : capture_(std::move(capture)), backend_(make_backend(device)) {
  test_delay();  // a bad POISE_STREAM_DELAY is the constructor's to report
}

Stream::~Stream() = default;

Event Stream::submit(Work work) {
  POISE_CHECK(work != nullptr);
  Reopen reopen = capture_ ? capture_() : Reopen();
  return Event(backend_->submit(std::move(work), std::move(reopen)));
}

void Stream::wait(const Event& event) {
  if (event.state_) backend_->wait(event.state_);
}

void Stream::synchronize() { backend_->synchronize(); }

void Stream::set_test_delay(std::uint64_t seed, std::int64_t max_microseconds) {
  test_delay().state = seed;
  test_delay().max_microseconds = max_microseconds;
}

}  // namespace poise
