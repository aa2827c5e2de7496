// What a second run must find as the first one did: random state and autocast. Buffers are the
// other way round: the second run must leave them as it found them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

namespace poise::checkpointing {

// State of the default generators: the CPU's, and those of the GPUs that are in use.
class RandomState {
 public:
  static RandomState capture();
  void restore() const;
  bool operator==(const RandomState& other) const;

 private:
  struct Entry {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Entry> entries_;
};

// Autocast of the calling thread, for the two kinds of device that have it here.
class AutocastState {
 public:
  static AutocastState capture();
  void restore() const;

 private:
  struct Device {
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::array<Device, 2> devices_;
  bool cache_enabled_ = true;
};

// While it lives, the thread's autocast is `state`; casts cached meanwhile go with it.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState previous_ = AutocastState::capture();
};

// Puts the random state back at its end.
class RandomScope {
 public:
  ~RandomScope() { previous_.restore(); }
  RandomScope() = default;
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomState previous_ = RandomState::capture();
};

// Puts the values of `buffers` back at its end.
class BufferScope {
 public:
  explicit BufferScope(const std::vector<at::Tensor>& buffers);
  ~BufferScope();
  BufferScope(const BufferScope&) = delete;
  BufferScope& operator=(const BufferScope&) = delete;

 private:
  const std::vector<at::Tensor>& buffers_;
  std::vector<at::Tensor> values_;
};

}  // namespace poise::checkpointing
