// Stop 10 over states that may live away from the device: tile by tile through a little host
// memory, the next tile on its way in and the last one on its way out while one is updated.
#pragma once

#include <functional>
#include <vector>

#include "poise/config.h"
#include "poise/offload.h"
#include "poise/optim.h"

namespace poise::engine {

// What the optimizer updates of one trainable flat, wherever it lives.
struct OptimizerState {
  int flat = 0;
  offload::SpanPtr master;  // fp32; the values themselves where those are fp32
  std::vector<offload::SpanPtr> moments;
  std::vector<std::int64_t> blocks;  // of each: elements of the master that one of it is for;
                                     // 0: it is of whole parameters
  offload::SpanPtr low;              // 16-bit copy that forward reads; null for fp32
  offload::SpanPtr gradient;
  std::vector<optim::Segment> segments;
  // Where the optimizer has rounds: all parameters of the flat, and the sums of this update.
  std::vector<optim::Parameter> parameters;
  std::vector<at::Tensor> sums;
};

class StateUpdate {
 public:
  // Spans that are all on one device are updated there as a whole. Of the others each tile is
  // updated by the CPU: spans in memory of the host in place, the rest by way of staging memory,
  // three tiles of it, at most policy.staging_bytes. `Direct::no` stages all (tests).
  enum class Direct { yes, no };
  StateUpdate(std::vector<OptimizerState>& states, const config::OffloadPolicy& policy,
              offload::HostMemory& memory, Direct direct = Direct::yes);

  // `apply` updates a span, or a part of one; `updated` hears of each flat once its values are
  // there for the current stream. Elementwise optimizers give the same bits whatever the tiles.
  using Apply = std::function<void(optim::Span&)>;
  using Updated = std::function<void(int flat)>;
  void run(const Apply& apply, const Updated& updated);

  std::int64_t staging_bytes() const;

 private:
  // An array of a state as a tile sees it.
  struct Operand {
    offload::Span* span = nullptr;  // null: the state has none
    std::int64_t block = 1;         // elements of the master that one of its is for
    at::Tensor direct;              // the whole span where it is worked on in place
    bool read = false, written = false;
  };
  struct Part {
    OptimizerState* state;
    bool whole;                     // one device: updated there
    std::vector<Operand> operands;  // master, low, gradient, moments
  };
  struct Tile {
    Part* part;
    std::int64_t begin, count;
    bool last;  // of its flat
  };
  // Staging memory of one tile, and what is on its way from or to it.
  struct Slot {
    std::vector<at::Tensor> buffers;  // by operand, bytes
    std::vector<Event> events;
  };

  Part part_of(OptimizerState& state, Direct direct) const;
  void make_tiles(const config::OffloadPolicy& policy);
  void make_slots(offload::HostMemory& memory);
  Slot& slot(std::size_t tile) { return slots_[tile % kSlots]; }
  at::Tensor tensor_of(std::size_t tile, std::size_t operand);
  void fetch(std::size_t tile);
  void update(std::size_t tile, const Apply& apply);
  void put(std::size_t tile);
  void settle() noexcept;

  static constexpr std::size_t kSlots = 3;  // in, at work, out
  std::vector<Part> parts_;
  std::vector<Tile> tiles_;
  std::vector<Slot> slots_;
  std::vector<Event> values_;  // of the flat at work, on their way to the device
};

}  // namespace poise::engine
