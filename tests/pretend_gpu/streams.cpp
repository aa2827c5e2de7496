// Streams, events and copies.
//
// [Note: late] A stream is a queue that the program itself empties: by waiting for it or for an
// event, by an operator of torch on it, by a copy that returns only when it is done. A task that
// waits for an event first runs what the other stream has queued before that event. So whatever
// reads without waiting reads what was there before, and whatever is overwritten too early is seen
// overwritten. With PRETEND_GPU_SEED some tasks run early, by chance, as a GPU might.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "memory.h"
#include "pretend_gpu.h"
#include "runtime.h"

namespace pretend_gpu {
namespace {

struct Stream;

// One recording of an event.
struct Mark {
  Stream* stream;
  bool reached = false;
};

struct Task {
  std::function<void()> work;  // any of these may be missing
  std::shared_ptr<Mark> waits_for;
  std::shared_ptr<Mark> reaches;
  std::function<bool()> attempt;  // until it returns true
};

struct Stream {
  int device;
  int priority = 0;
  std::deque<Task> tasks;
  int attempts = 0;  // among the tasks
};

struct Event {
  int device;
  std::shared_ptr<Mark> last;  // null: never recorded
};

// Streams are never destroyed: marks point to them.
std::vector<Stream*>& streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}

Stream& default_stream(int device) {
  static auto* all = [] {
    auto* made = new std::vector<Stream*>;
    for (int d = 0; d < device_count(); ++d) {
      made->push_back(new Stream{d, 0, {}, 0});
      streams().push_back(made->back());
    }
    return made;
  }();
  return *(*all)[device];
}

// 0, 1 and 2 are names of the current device's default stream.
Stream& stream_of(cudaStream_t handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return default_stream(current_device());
  return *reinterpret_cast<Stream*>(handle);
}

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

// One step towards the end of the first task, which may be one of what it waits for; false: it
// waits for another process. Ends, because streams cannot wait in a circle: an event that was not
// yet recorded is not waited for.
bool advance(Stream& stream) {
  Task& first = stream.tasks.front();
  if (first.waits_for && !first.waits_for->reached && first.waits_for->stream != &stream) {
    return advance(*first.waits_for->stream);
  }
  if (first.attempt && !first.attempt()) return false;
  const Task task = std::move(first);
  stream.tasks.pop_front();
  if (task.attempt) --stream.attempts;
  if (task.work) task.work();
  if (task.reaches) task.reaches->reached = true;
  return true;
}

bool reached(const Stream& stream, const Mark* until) {
  return stream.tasks.empty() || (until && until->reached);
}

void run(Stream& stream, const Mark* until = nullptr) {
  while (!reached(stream, until)) {
    if (!advance(stream)) let_others();
  }
}

// What can be done without waiting for another process.
void run_ready(Stream& stream, const Mark* until = nullptr) {
  while (!reached(stream, until) && advance(stream)) {
  }
}

void queue(Stream& stream, Task task) {
  stream.tasks.push_back(std::move(task));
  if (!sometimes_early() || random_below(3) > 0) return;
  Stream& lucky = *streams()[random_below(static_cast<unsigned>(streams().size()))];
  for (unsigned count = random_below(8); count > 0 && !lucky.tasks.empty(); --count) {
    if (!advance(lucky)) return;
  }
}

// Other processes may wait for what this one has queued while it waits for a word of theirs: in the
// end such tasks run by themselves. Late, as long as the program itself asks (see [Note: late]).
void run_attempts_in_the_end() {
  constexpr std::chrono::milliseconds kLate{2};
  for (;;) {
    std::this_thread::sleep_for(kLate);
    const Lock lock;
    for (Stream* stream : streams()) {
      while (stream->attempts > 0 && advance(*stream)) {
      }
    }
  }
}

}  // namespace

int device_of_stream(cudaStream_t stream) { return stream_of(stream).device; }

void reach_all() {
  const Lock lock;
  for (std::size_t i = 0; i < streams().size(); ++i) run(*streams()[i]);  // more may come meanwhile
}

void reach(cudaStream_t stream) {
  const Lock lock;
  run(stream_of(stream));
}

cudaError_t launch(cudaStream_t handle, std::function<void()> kernel) {
  const Lock lock;
  Stream& stream = stream_of(handle);
  if (stream.device != current_device()) return failed(cudaErrorInvalidResourceHandle);
  queue(stream, {[device = stream.device, kernel = std::move(kernel)] {
                   const Kernel runs(device);
                   kernel();
                 },
                 nullptr, nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t launch_attempts(cudaStream_t handle, std::function<bool()> attempt) {
  static const bool started = [] {
    std::thread(run_attempts_in_the_end).detach();
    return true;
  }();
  static_cast<void>(started);
  const Lock lock;
  Stream& stream = stream_of(handle);
  ++stream.attempts;
  queue(stream, {nullptr, nullptr, nullptr, std::move(attempt)});
  return cudaSuccess;
}

}  // namespace pretend_gpu

using namespace pretend_gpu;

static std::atomic<std::size_t> host_waits{0};

extern "C" {

// For tests, by ctypes: how often the program has waited for the device.
std::size_t pretend_gpu_host_waits() { return host_waits; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  const Lock lock;
  streams().push_back(new Stream{current_device(), priority, {}, 0});
  *stream = reinterpret_cast<cudaStream_t>(streams().back());
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  reach(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++host_waits;
  reach(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++host_waits;
  reach_all();
  return cudaSuccess;
}

// What is asked again and again is done in the end.
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock;
  Stream& stream = stream_of(handle);
  if (!stream.tasks.empty() && random_below(2) == 0) run_ready(stream);
  return stream.tasks.empty() ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  const Lock lock;
  const auto& mark = event_of(handle).last;
  if (mark && !mark->reached) queue(stream_of(stream), {nullptr, mark, nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{current_device(), nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const Lock lock;
  Stream& stream = stream_of(stream_handle);
  Event& event = event_of(handle);
  if (event.device != stream.device) return failed(cudaErrorInvalidResourceHandle);
  event.last = std::make_shared<Mark>(Mark{&stream, stream.tasks.empty()});
  if (!event.last->reached) queue(stream, {nullptr, nullptr, event.last, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ++host_waits;
  const Lock lock;
  const auto mark = event_of(handle).last;
  if (mark) run(*mark->stream, mark.get());
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Lock lock;
  const auto mark = event_of(handle).last;
  if (!mark || mark->reached) return cudaSuccess;
  if (random_below(4) == 0) run_ready(*mark->stream, mark.get());
  return mark->reached ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

// Pageable memory: what is copied from there has left it when the call returns, and what is copied
// there has arrived.
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t handle) {
  const Lock lock;
  Stream& stream = stream_of(handle);
  std::function<void()> copy = [=] { copy_bytes(to, from, bytes); };
  if (device_of(from) == kHost && !is_pinned(from)) {
    const auto* source = static_cast<const char*>(from);
    copy = [=, staged = std::vector<char>(source, source + bytes)] {
      copy_bytes(to, staged.data(), bytes);
    };
  }
  queue(stream, {std::move(copy), nullptr, nullptr, nullptr});
  if (device_of(to) == kHost && !is_pinned(to)) run(stream);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const Lock lock;
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  reach(nullptr);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const Lock lock;
  queue(stream_of(stream), {[=] { fill_bytes(to, value, bytes); }, nullptr, nullptr, nullptr});
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  const Lock lock;
  cudaMemsetAsync(to, value, bytes, nullptr);
  reach(nullptr);
  return cudaSuccess;
}

}  // extern "C"
