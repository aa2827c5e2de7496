// The stores of one engine, and what goes where.
#pragma once

#include <memory>

#include "poise/config.h"
#include "poise/offload.h"
#include "zero/flat_store.h"
#include "zero/shards.h"

namespace poise::engine {

class Offloading {
 public:
  // Opens no file and takes no memory where nothing is offloaded.
  Offloading(const config::OffloadPolicy& policy, const ParamTable& table,
             const zero::Shards& shards, c10::Device device);

  // Opened by the first who asks; null for none.
  std::shared_ptr<offload::Store> store(config::Offload where);
  // Takes tensors of the device, wherever they go; null where they stay.
  std::shared_ptr<offload::Store> store_of_activations();
  // Masters and moments of a flat; null: the device.
  std::shared_ptr<offload::Store> states_of(int flat) const {
    return places_.masters[static_cast<std::size_t>(flat)];
  }
  const zero::Places& places() const { return places_; }
  offload::HostMemory& memory() { return *memory_; }

  std::int64_t host_bytes() const { return memory_->peak_bytes(); }
  std::int64_t file_bytes() const { return file_ ? file_->file_bytes() : 0; }

 private:
  std::shared_ptr<offload::Store> for_device(std::shared_ptr<offload::Store> store,
                                             config::Offload where) const;
  void place_states(const ParamTable& table, const zero::Shards& shards);
  void place_gradients(const zero::Shards& shards);
  void place_parameters(const zero::Shards& shards);

  const config::OffloadPolicy policy_;
  const c10::Device device_;
  std::shared_ptr<offload::HostMemory> memory_;
  std::shared_ptr<offload::Store> host_, file_;  // null until something asks
  zero::Places places_;
};

}  // namespace poise::engine
