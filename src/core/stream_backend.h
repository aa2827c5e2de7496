// What a device provides behind Stream and Event.
#pragma once

#include <memory>

#include "poise/interrupt.h"
#include "poise/stream.h"

namespace poise {

class EventState {
 public:
  virtual ~EventState() = default;
  virtual bool done() const = 0;
  virtual void order_current() = 0;           // Event::wait
  virtual bool block(Deadline deadline) = 0;  // false: the deadline came first
  virtual void block_worker() = 0;            // from a stream's own thread: no interrupts
};

class StreamBackend {
 public:
  virtual ~StreamBackend() = default;
  virtual std::shared_ptr<EventState> submit(Stream::Work work, Stream::Reopen reopen) = 0;
  virtual void wait(const std::shared_ptr<EventState>& event) = 0;
  virtual void synchronize() = 0;
};

std::unique_ptr<StreamBackend> make_cpu_stream();
std::unique_ptr<StreamBackend> make_cuda_stream(c10::Device device);  // throws Error without CUDA

// The pause before the next operation under the test switch; returns at once where it is off.
void pause_for_test();

}  // namespace poise
