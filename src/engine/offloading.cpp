// Which store, and which part of the states.
#include "engine/offloading.h"

#include "poise/error.h"

namespace poise::engine {

Offloading::Offloading(const config::OffloadPolicy& policy, const ParamTable& table,
                       const zero::Shards& shards, c10::Device device)
    : policy_(policy),
      device_(device),
      memory_(std::make_shared<offload::HostMemory>(device, policy.pinned_budget_bytes)) {
  place_states(table, shards);
  place_gradients(shards);
  place_parameters(shards);
}

std::shared_ptr<offload::Store> Offloading::store(config::Offload where) {
  if (where == config::Offload::none) return nullptr;
  if (where == config::Offload::host) {
    if (!host_) host_ = offload::host_store(memory_, device_);
    return host_;
  }
  if (!file_) file_ = offload::file_store(policy_, memory_);
  return file_;
}

// A file takes tensors of the CPU.
std::shared_ptr<offload::Store> Offloading::for_device(std::shared_ptr<offload::Store> store,
                                                       config::Offload where) const {
  if (where != config::Offload::file || device_.is_cpu()) return store;
  return offload::staged_store(std::move(store), memory_, device_);
}

std::shared_ptr<offload::Store> Offloading::store_of_activations() {
  return for_device(store(policy_.activations), policy_.activations);
}

// Whole flats from the first on, until the fraction is reached: the same ones on every rank.
void Offloading::place_states(const ParamTable& table, const zero::Shards& shards) {
  const int flats = static_cast<int>(table.flats().size());
  places_.masters.resize(static_cast<std::size_t>(flats));
  const auto elements = [&](int flat) {
    const auto& layout = table.flats()[static_cast<std::size_t>(flat)];
    return layout.trainable ? static_cast<double>(shards.optimized(flat).size()) : 0.0;
  };
  double left = 0;
  for (int flat = 0; flat < flats; ++flat) left += elements(flat);
  left *= policy_.optimizer_fraction;
  for (int flat = 0; flat < flats && left > 0; ++flat) {
    if (elements(flat) == 0) continue;
    places_.masters[static_cast<std::size_t>(flat)] = store(policy_.optimizer);
    left -= elements(flat);
  }
}

void Offloading::place_gradients(const zero::Shards& shards) {
  places_.gradients = store(policy_.gradients);
  places_.memory = memory_.get();
  if (!places_.gradients || shards.size() == 1 || shards.splits_gradients()) return;
  const bool file = policy_.gradients == config::Offload::file;
  if (!file && device_.is_cpu()) return;
  fail("engine", "offload.gradients is ", file ? "file on " : "host on GPUs of ", shards.size(),
       " ranks that join whole gradients once per window, which they can do in memory of the "
       "device only; set zero.stage to 2, or to 3 with zero.reduce every");
}

void Offloading::place_parameters(const zero::Shards& shards) {
  places_.parameters = for_device(store(policy_.parameters), policy_.parameters);
  if (places_.parameters && !shards.splits_parameters()) {
    fail("engine", "offload.parameters on ", shards.size(),
         " ranks that all keep whole parameters; set zero.stage to 3");
  }
}

}  // namespace poise::engine
