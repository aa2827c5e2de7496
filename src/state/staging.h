// Memory that a save passes through: tiles of one size, as many as the limit allows, used again and
// again. The one who fills them waits while all are on their way to the disk.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "poise/offload.h"

namespace poise::state {

inline constexpr std::size_t kTile = std::size_t{4} << 20;

class Staging {
 public:
  // `limit` bytes of `memory`, at least two tiles: outside ledger and budget, so that what fits the
  // device can be saved. `memory` outlives it.
  Staging(offload::HostMemory& memory, std::int64_t limit);

  struct Tile {
    at::Tensor memory;
    char* data = nullptr;  // kTile bytes, page-aligned
  };
  // The thread that runs the training looks for Ctrl-C while it waits; others must not.
  enum class Wait { interruptible, plain };
  std::optional<Tile> take_at_once();  // nullopt: none is to be had before one comes back
  Tile take_when_back(Wait wait);      // who has filled some must have handed them on
  void give_back(Tile tile);           // from any thread
  void free_unused();
  void make(std::int64_t bytes);  // as far as the limit allows, pages and all

 private:
  Tile new_tile();
  Tile last_unused();

  offload::HostMemory& memory_;
  const std::size_t limit_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<Tile> unused_;
  std::size_t made_ = 0;
};

}  // namespace poise::state
