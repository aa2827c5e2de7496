// Streams and events: work that runs in order beside the thread that submits it. Real on the CPU
// too: there a stream is a worker thread (started by the first submit, joined with the stream); on
// CUDA it is a CUDA stream. Everything that overlaps is written once against these two.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "poise/export.h"

namespace poise {

class EventState;
class StreamBackend;

// The end of one operation. A handle that copies share; it may outlive its stream.
class POISE_API Event {
 public:
  Event() = default;  // already over

  bool done() const;
  // Orders what the calling thread does next after the operation: blocks on the CPU, makes the
  // current stream wait on CUDA. Rethrows the operation's exception, each time it is called.
  void wait() const;
  // Blocks the calling thread on CUDA too.
  void synchronize() const;
  // The same on a stream's own thread, which nobody interrupts (that would take Python's lock).
  void synchronize_on_worker() const;
  // synchronize() with a limit; false: not over yet.
  bool wait_for(std::chrono::milliseconds timeout) const;

 private:
  friend class Stream;
  explicit Event(std::shared_ptr<EventState> state) : state_(std::move(state)) {}
  std::shared_ptr<EventState> state_;
};

// One thread drives a stream. In a forked child a stream starts anew and empty; waiting there for
// an event from before the fork that was not over is an Error.
class POISE_API Stream {
 public:
  using Work = std::function<void()>;
  // Takes along what is thread-local to the submitter: capture() runs in submit(); what it returns
  // runs on the worker before the work, and its result is dropped after it.
  using Reopen = std::function<std::shared_ptr<void>()>;
  using Capture = std::function<Reopen()>;

  explicit Stream(c10::Device device = c10::Device(c10::DeviceType::CPU), Capture capture = {});
  ~Stream();  // runs what is queued to its end
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // `work` runs after everything submitted before and after what the calling thread did before.
  // What it captured is dropped before the event is over; on CUDA it is held until the event is, or
  // until the stream that was current here was ordered after it. When it throws, later operations
  // are not run and fail with the same exception, until synchronize() has rethrown it. (On CUDA the
  // closure itself runs at once and throws from here.)
  Event submit(Work work);
  // Later operations run after `event`; where it failed, they fail like after a failed operation.
  void wait(const Event& event);
  // Blocks until everything submitted is over; rethrows a failure once, then the stream is usable.
  void synchronize();

  // Test switch for the whole process: a random pause of up to `max_microseconds` before every
  // operation of CPU streams; 0 switches it off. The environment sets it too:
  // POISE_STREAM_DELAY=<max_microseconds>.
  static void set_test_delay(std::uint64_t seed, std::int64_t max_microseconds);

 private:
  Capture capture_;
  std::unique_ptr<StreamBackend> backend_;
};

}  // namespace poise
