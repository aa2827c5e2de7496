// The accumulators of gradients, by flat: in memory of the device or the host all the time, or in
// a store whose spans are no memory (a file). Of the latter a few at a time are in host memory,
// each worked on there, put back while the next one is, and fetched ahead of its turn.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "poise/offload.h"

namespace poise::zero {

class Accumulators {
 public:
  enum class Use { read, write };

  // Spans by flat, null where nothing is trained. Takes from `memory` kRooms times the largest of
  // those that are no memory.
  Accumulators(std::vector<offload::SpanPtr> spans, offload::HostMemory* memory);
  ~Accumulators();
  Accumulators(const Accumulators&) = delete;
  Accumulators& operator=(const Accumulators&) = delete;

  const offload::SpanPtr& span(int flat) const { return spans_[static_cast<std::size_t>(flat)]; }
  // Some come and go: what get() returns is theirs only until it is called again.
  bool away() const { return away_; }
  c10::Device device() const { return device_; }

  // 1-D. Garbage where it was not written since forget(). Blocks where it has to be fetched; throws
  // Error where that or an earlier way out failed.
  at::Tensor get(int flat, Use use);
  // Of those that are away: on its way in, as it will be asked for next; on its way out.
  void expect(int flat);
  void put_back(int flat);
  // All that were written are in their spans, which may be read. Blocks; throws Error where a way
  // out failed: while the window can still be dropped whole.
  void settle();
  // What all hold means nothing any more.
  void forget() noexcept;

 private:
  struct Room {
    at::Tensor bytes;
    int flat = -1;  // whose it is now; -1: nobody's
    bool written = false;
    Event moved;             // the last transfer from or to here
    std::uint64_t used = 0;  // when: the one not used for longest gives way
  };
  static constexpr std::size_t kRooms = 3;  // in, at work, out

  at::Tensor tensor_in(const Room& room) const;
  Room& room_of(int flat);
  void send(Room& room);
  void wait_for(Room& room);

  std::vector<offload::SpanPtr> spans_;
  std::vector<char> kept_;  // by flat: its span has what was written since forget()
  std::array<Room, kRooms> rooms_;
  std::uint64_t uses_ = 0;
  bool away_ = false;
  c10::Device device_ = c10::kCPU;
};

}  // namespace poise::zero
