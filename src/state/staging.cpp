// Tiles.
#include "state/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "poise/error.h"
#include "poise/interrupt.h"
#include "state/files.h"

namespace poise::state {

Staging::Staging(offload::HostMemory& memory, std::int64_t limit)
    : memory_(memory), limit_(std::max<std::size_t>(2, static_cast<std::size_t>(limit) / kTile)) {}

Staging::Tile Staging::new_tile() {
  Tile tile;
  tile.memory = memory_.allocate(static_cast<std::int64_t>(kTile), at::kByte);
  tile.data = static_cast<char*>(tile.memory.mutable_data_ptr());
  POISE_CHECK(reinterpret_cast<std::uintptr_t>(tile.data) % offload::kSector == 0);
  return tile;
}

std::optional<Staging::Tile> Staging::take_at_once() {
  const std::lock_guard lock(mutex_);
  if (!unused_.empty()) return last_unused();
  if (made_ >= limit_) return std::nullopt;
  try {
    auto tile = new_tile();
    ++made_;
    return tile;
  } catch (const Error&) {
    if (made_ < 2) throw;  // with two the save goes on, slower
    return std::nullopt;
  }
}

Staging::Tile Staging::take_when_back(Wait wait) {
  std::unique_lock lock(mutex_);
  const auto is_back = [&] { return !unused_.empty(); };  // each tile is: written or given up
  if (wait == Wait::interruptible) {
    interruptible_wait(returned_, lock, is_back);
  } else {
    returned_.wait(lock, is_back);
  }
  return last_unused();
}

Staging::Tile Staging::last_unused() {
  auto tile = std::move(unused_.back());
  unused_.pop_back();
  return tile;
}

void Staging::give_back(Tile tile) {
  const std::lock_guard lock(mutex_);
  unused_.push_back(std::move(tile));
  returned_.notify_one();
}

void Staging::make(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto wanted = std::min(limit_, static_cast<std::size_t>(bytes) / kTile + 1);
  try {
    for (; made_ < wanted; ++made_) {
      unused_.push_back(new_tile());
      std::memset(unused_.back().data, 0, kTile);  // else the save would wait for its pages
    }
  } catch (const Error&) {  // the save will do with what there is
  }
}

void Staging::free_unused() {
  const std::lock_guard lock(mutex_);
  made_ -= unused_.size();
  unused_.clear();
}

}  // namespace poise::state
