// Tiles and their three slots.
#include "engine/state_update.h"

#include <algorithm>
#include <cstring>

#include "poise/error.h"

namespace poise::engine {
namespace {

constexpr std::size_t kMaster = 0, kLow = 1, kGradient = 2, kMoments = 3;

std::int64_t size_of(const offload::Span& span) {
  return static_cast<std::int64_t>(c10::elementSize(span.dtype()));
}

// Segments that lie in [begin, end), counted from begin.
std::vector<optim::Segment> cut(const std::vector<optim::Segment>& segments, std::int64_t begin,
                                std::int64_t end) {
  auto first = std::lower_bound(segments.begin(), segments.end(), begin,
                                [](const auto& s, std::int64_t at) { return s.end <= at; });
  std::vector<optim::Segment> inside;
  for (; first != segments.end() && first->begin < end; ++first) {
    auto part = *first;
    part.begin = std::max(first->begin, begin) - begin;
    part.end = std::min(first->end, end) - begin;
    part.first += part.begin + begin - first->begin;
    inside.push_back(part);
  }
  return inside;
}

// Padding stays zero; what a staged array that is only written has there is of another tile.
void zero_padding(const at::Tensor& array, const std::vector<optim::Segment>& segments) {
  auto* data = static_cast<char*>(array.mutable_data_ptr());
  const auto size = static_cast<std::int64_t>(array.element_size());
  std::int64_t filled = 0;
  const auto zero_to = [&](std::int64_t end) {
    std::memset(data + filled * size, 0, static_cast<std::size_t>((end - filled) * size));
  };
  for (const auto& segment : segments) {
    zero_to(segment.begin);
    filled = segment.end;
  }
  zero_to(array.numel());
}

optim::Span span_of(const std::vector<at::Tensor>& tensors, std::vector<optim::Segment> segments) {
  optim::Span span;
  span.master = tensors[kMaster];
  span.low = tensors[kLow];
  span.gradient = tensors[kGradient];
  span.moments.assign(tensors.begin() + kMoments, tensors.end());
  span.segments = std::move(segments);
  return span;
}

}  // namespace

StateUpdate::StateUpdate(std::vector<OptimizerState>& states, const config::OffloadPolicy& policy,
                         offload::HostMemory& memory, Direct direct) {
  for (auto& state : states) parts_.push_back(part_of(state, direct));
  make_tiles(policy);
  make_slots(memory);
}

StateUpdate::Part StateUpdate::part_of(OptimizerState& state, Direct direct) const {
  Part part{&state, true, {}};
  part.operands.push_back({state.master.get(), 1, {}, true, true});
  part.operands.push_back({state.low.get(), 1, {}, false, true});
  part.operands.push_back({state.gradient.get(), 1, {}, true, false});
  for (std::size_t m = 0; m < state.moments.size(); ++m) {
    part.operands.push_back({state.moments[m].get(), state.blocks[m], {}, true, true});
  }
  const auto gradient = state.gradient->tensor();
  for (auto& operand : part.operands) {
    if (operand.span == nullptr) continue;
    operand.direct = operand.span->tensor();
    if (operand.block == 0) continue;
    part.whole = part.whole && gradient.defined() && operand.direct.defined() &&
                 operand.direct.device() == gradient.device();
  }
  part.whole = part.whole && direct == Direct::yes;
  for (auto& operand : part.operands) {
    if (part.whole || !operand.direct.defined()) continue;
    if (!operand.direct.device().is_cpu() || direct == Direct::no) operand.direct = at::Tensor();
  }
  return part;
}

// As many elements as the staging memory allows, in whole blocks of fp32.
void StateUpdate::make_tiles(const config::OffloadPolicy& policy) {
  std::int64_t bytes = 0;  // of an element, in the state that needs most
  for (const auto& part : parts_) {
    std::int64_t staged = 0;
    for (const auto& operand : part.operands) {
      if (operand.span == nullptr || operand.direct.defined()) continue;
      staged += (size_of(*operand.span) + operand.block - 1) / operand.block;
    }
    bytes = std::max(bytes, staged);
  }
  const auto block = policy.block_bytes / std::int64_t{sizeof(float)};
  const auto most = policy.staging_bytes / static_cast<std::int64_t>(kSlots) /
                    std::max<std::int64_t>(bytes, 1) / block * block;
  POISE_CHECK(most > 0, policy.staging_bytes);
  for (auto& part : parts_) {
    const auto numel = part.state->master->numel();
    const auto tile = part.whole || bytes == 0 ? std::max<std::int64_t>(numel, 1) : most;
    for (std::int64_t begin = 0; begin < numel; begin += tile) {
      const auto count = std::min(tile, numel - begin);
      tiles_.push_back({&part, begin, count, begin + count == numel});
    }
  }
}

void StateUpdate::make_slots(offload::HostMemory& memory) {
  std::vector<std::int64_t> bytes;  // by operand
  for (const auto& tile : tiles_) {
    const auto& operands = tile.part->operands;
    bytes.resize(std::max(bytes.size(), operands.size()));
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].span == nullptr || operands[i].direct.defined()) continue;
      const auto count = tile.count / operands[i].block;
      bytes[i] = std::max(bytes[i], count * size_of(*operands[i].span));
    }
  }
  slots_.resize(kSlots);
  for (auto& slot : slots_) {
    for (const auto size : bytes) slot.buffers.push_back(memory.allocate(size, at::kByte));
  }
}

std::int64_t StateUpdate::staging_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& slot : slots_) {
    for (const auto& buffer : slot.buffers) bytes += static_cast<std::int64_t>(buffer.nbytes());
  }
  return bytes;
}

at::Tensor StateUpdate::tensor_of(std::size_t index, std::size_t operand) {
  const auto& tile = tiles_[index];
  const auto& [span, block, direct, read, written] = tile.part->operands[operand];
  if (span == nullptr) return {};
  if (block == 0) return direct;
  const auto count = tile.count / block;
  if (direct.defined()) return direct.narrow(0, tile.begin / block, count);
  const auto& buffer = slot(index).buffers[operand];
  return buffer.narrow(0, 0, count * size_of(*span)).view(span->dtype());
}

// The slot's last tile is out, and this one on its way in.
void StateUpdate::fetch(std::size_t index) {
  auto& events = slot(index).events;
  for (const auto& event : events) event.synchronize();
  events.clear();
  const auto& operands = tiles_[index].part->operands;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto& operand = operands[i];
    if (operand.span == nullptr || operand.direct.defined() || !operand.read) continue;
    events.push_back(operand.span->fetch(tiles_[index].begin / operand.block, tensor_of(index, i)));
  }
}

void StateUpdate::update(std::size_t index, const Apply& apply) {
  auto& events = slot(index).events;
  for (const auto& event : events) event.synchronize();
  events.clear();
  const auto& tile = tiles_[index];
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < tile.part->operands.size(); ++i) {
    tensors.push_back(tensor_of(index, i));
  }
  const auto end = tile.begin + tile.count;
  auto span = span_of(tensors, cut(tile.part->state->segments, tile.begin, end));
  span.parameters = tile.part->state->parameters;
  span.sums = tile.part->state->sums;
  if (span.low.defined() && !tile.part->operands[kLow].direct.defined()) {
    zero_padding(span.low, span.segments);
  }
  apply(span);
}

void StateUpdate::put(std::size_t index) {
  const auto& operands = tiles_[index].part->operands;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto& operand = operands[i];
    if (operand.span == nullptr || operand.direct.defined() || !operand.written) continue;
    const auto event = operand.span->put(tiles_[index].begin / operand.block, tensor_of(index, i));
    slot(index).events.push_back(event);
    if (operand.span->tensor().defined()) values_.push_back(event);
  }
}

void StateUpdate::run(const Apply& apply, const Updated& updated) {
  try {
    if (!tiles_.empty()) fetch(0);
    for (std::size_t i = 0; i < tiles_.size(); ++i) {
      if (i + 1 < tiles_.size()) fetch(i + 1);
      update(i, apply);
      put(i);
      if (!tiles_[i].last) continue;
      for (const auto& event : values_) event.wait();
      values_.clear();
      updated(tiles_[i].part->state->flat);
    }
    for (auto& slot : slots_) {
      for (const auto& event : slot.events) event.synchronize();
      slot.events.clear();
    }
  } catch (...) {
    settle();
    throw;
  }
}

// After a failure nothing may still write into the slots.
void StateUpdate::settle() noexcept {
  values_.clear();
  for (auto& slot : slots_) {
    for (const auto& event : slot.events) {
      try {
        event.synchronize_on_worker();  // an interrupt would not end the transfer
      } catch (...) {
        // It follows the failure that is on its way to the caller.
      }
    }
    slot.events.clear();
  }
}

}  // namespace poise::engine
