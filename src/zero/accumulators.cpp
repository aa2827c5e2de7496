// Three rooms of host memory, and which flat has which.
#include "zero/accumulators.h"

#include <algorithm>
#include <utility>

#include "poise/error.h"

namespace poise::zero {

Accumulators::Accumulators(std::vector<offload::SpanPtr> spans, offload::HostMemory* memory)
    : spans_(std::move(spans)), kept_(spans_.size()) {
  std::int64_t largest = 0;  // bytes
  for (const auto& span : spans_) {
    if (!span) continue;
    if (const auto here = span->tensor(); here.defined()) {
      device_ = here.device();
      continue;
    }
    away_ = true;
    const auto size = static_cast<std::int64_t>(c10::elementSize(span->dtype()));
    largest = std::max(largest, span->numel() * size);
  }
  if (!away_) return;
  POISE_CHECK(memory != nullptr);
  for (auto& room : rooms_) room.bytes = memory->allocate(largest, at::kByte);
}

Accumulators::~Accumulators() { forget(); }

at::Tensor Accumulators::tensor_in(const Room& room) const {
  const auto& span = *spans_[static_cast<std::size_t>(room.flat)];
  const auto size = static_cast<std::int64_t>(c10::elementSize(span.dtype()));
  return room.bytes.narrow(0, 0, span.numel() * size).view(span.dtype());
}

at::Tensor Accumulators::get(int flat, Use use) {
  if (const auto here = span(flat)->tensor(); here.defined()) return here;
  auto& room = room_of(flat);
  wait_for(room);
  room.used = ++uses_;
  room.written = room.written || use == Use::write;
  return tensor_in(room);
}

Accumulators::Room& Accumulators::room_of(int flat) {
  for (auto& room : rooms_) {
    if (room.flat == flat) return room;
  }
  auto& oldest = *std::min_element(rooms_.begin(), rooms_.end(),
                                   [](const Room& a, const Room& b) { return a.used < b.used; });
  send(oldest);
  wait_for(oldest);
  oldest.flat = flat;
  oldest.used = ++uses_;
  if (kept_[static_cast<std::size_t>(flat)]) oldest.moved = span(flat)->fetch(0, tensor_in(oldest));
  return oldest;
}

void Accumulators::send(Room& room) {
  if (room.flat < 0 || !room.written) return;
  room.written = false;
  room.moved = span(room.flat)->put(0, tensor_in(room));
  kept_[static_cast<std::size_t>(room.flat)] = 1;
}

// A transfer that failed leaves nothing that could be read. After an interrupt it goes on, and is
// still to be waited for: it would come into what the room holds by then.
void Accumulators::wait_for(Room& room) {
  try {
    room.moved.synchronize();
  } catch (...) {
    room.flat = -1;
    if (room.moved.done()) room.moved = {};
    throw;
  }
  room.moved = {};
}

void Accumulators::expect(int flat) {
  if (away_ && kept_[static_cast<std::size_t>(flat)]) room_of(flat);
}

void Accumulators::put_back(int flat) {
  for (auto& room : rooms_) {
    if (room.flat == flat) send(room);
  }
}

void Accumulators::settle() {
  for (auto& room : rooms_) send(room);
  for (auto& room : rooms_) wait_for(room);
}

void Accumulators::forget() noexcept {
  for (auto& room : rooms_) {
    try {
      // An interrupt would not end the transfer.
      std::exchange(room.moved, {}).synchronize_on_worker();
    } catch (...) {
      // What could not be moved is not wanted; who needed it has heard of it.
    }
    room.flat = -1;
    room.written = false;
  }
  std::fill(kept_.begin(), kept_.end(), 0);
}

}  // namespace poise::zero
