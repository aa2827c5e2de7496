// Reading and setting generators.
#include "state/random.h"

#include <ATen/Context.h>

#include <mutex>

namespace poise::state {

std::vector<c10::Device> generators_of(c10::Device device) {
  std::vector<c10::Device> devices{c10::Device(c10::kCPU)};
  if (!device.is_cpu()) devices.push_back(device);
  return devices;
}

std::string generator_name(c10::Device device) {
  return c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

std::vector<Piece> random_states(c10::Device device) {
  std::vector<Piece> states;
  for (const auto& one : generators_of(device)) {
    auto generator = at::globalContext().defaultGenerator(one);
    const std::lock_guard lock(generator.mutex());
    states.push_back({kRandom, generator_name(one), 0, generator.get_state()});
  }
  return states;
}

void set_random_state(c10::Device device, const at::Tensor& values) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(values);
}

RandomUntouched::~RandomUntouched() {
  const auto devices = generators_of(device_);
  for (std::size_t i = 0; i < devices.size(); ++i) set_random_state(devices[i], states_[i].values);
}

void seed_anew(c10::Device device, std::uint64_t seed, int rank, std::int64_t updates) {
  std::uint64_t mixed = seed;
  for (const auto part : {static_cast<std::uint64_t>(updates), static_cast<std::uint64_t>(rank)}) {
    mixed = (mixed ^ (part + 0x9E3779B97F4A7C15u)) * 0xBF58476D1CE4E5B9u;
    mixed ^= mixed >> 31;
  }
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(mixed);
}

}  // namespace poise::state
