// Taking and putting back the state around a second run. Devices are reached through ATen's hooks,
// so this file is the same with and without CUDA.
#include "checkpointing/replay.h"

#include <ATen/autocast_mode.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace poise::checkpointing {
namespace {

constexpr std::array<c10::DeviceType, 2> kAutocastDevices{c10::DeviceType::CPU,
                                                          c10::DeviceType::CUDA};

at::Tensor state_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// Generators hand out their state as CPU bytes, whatever their device.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Not the current one alone: forward of a model elsewhere runs under it, and its backward on a
// thread of autograd, whose current device is the model's. Asking the generator of a device where
// nothing runs would start a context there.
std::vector<c10::Device> gpus_in_use() {
  std::vector<c10::Device> devices;
  if (!at::globalContext().hasCUDA()) return devices;
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(c10::DeviceType::CUDA);
  const auto count = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    if (hooks.hasPrimaryContext(index)) devices.emplace_back(c10::DeviceType::CUDA, index);
  }
  return devices;
}

}  // namespace

RandomState RandomState::capture() {
  RandomState result;
  auto add = [&](const at::Generator& generator) {
    result.entries_.push_back({generator, state_of(generator)});
  };
  add(at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU)));
  for (const auto& device : gpus_in_use()) add(at::globalContext().defaultGenerator(device));
  return result;
}

void RandomState::restore() const {
  for (const auto& entry : entries_) {
    auto generator = entry.generator;
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(entry.state);
  }
}

bool RandomState::operator==(const RandomState& other) const {
  if (entries_.size() != other.entries_.size()) return false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].generator != other.entries_[i].generator ||
        !same_bytes(entries_[i].state, other.entries_[i].state)) {
      return false;
    }
  }
  return true;
}

AutocastState AutocastState::capture() {
  AutocastState state;
  for (size_t i = 0; i < kAutocastDevices.size(); ++i) {
    state.devices_[i] = {at::autocast::is_autocast_enabled(kAutocastDevices[i]),
                         at::autocast::get_autocast_dtype(kAutocastDevices[i])};
  }
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::restore() const {
  for (size_t i = 0; i < kAutocastDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kAutocastDevices[i], devices_[i].enabled);
    at::autocast::set_autocast_dtype(kAutocastDevices[i], devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastScope::AutocastScope(const AutocastState& state) {
  state.restore();
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  previous_.restore();
}

BufferScope::BufferScope(const std::vector<at::Tensor>& buffers) : buffers_(buffers) {
  at::NoGradGuard no_grad;
  for (const auto& buffer : buffers) values_.push_back(buffer.clone());
}

BufferScope::~BufferScope() {
  at::NoGradGuard no_grad;
  // Through variable_data(): to autograd the buffer was never touched.
  for (size_t i = 0; i < values_.size(); ++i) buffers_[i].variable_data().copy_(values_[i]);
}

}  // namespace poise::checkpointing
