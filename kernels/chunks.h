// Fixed chunks of work. Every kernel cuts each of its spans (pieces, segments) into chunks of
// kChunk elements counted from the span's begin, and numbers them through: thousands of tiny spans
// and one huge span are the same kind of parallel loop. All arithmetic is 64-bit.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/body.h"
#include "kernels/launch.h"

namespace poise::kernels {

inline constexpr std::int64_t kChunk = 8192;

POISE_BODY std::int64_t chunks_of(std::int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Index of the span that holds `chunk`: first_chunk[s] <= chunk < first_chunk[s + 1].
// first_chunk has num_spans + 1 entries; empty spans hold no chunk.
POISE_BODY std::int64_t span_of_chunk(const std::int64_t* first_chunk, std::int64_t num_spans,
                                      std::int64_t chunk) {
  std::int64_t low = 0;
  std::int64_t high = num_spans;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    if (first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Chunk {
  std::int64_t span = 0;
  std::int64_t offset = 0;  // elements from the span's begin
  std::int64_t count = 0;   // at most kChunk
};

class ChunkMap {
 public:
  // numel(s) is the length of span s.
  template <class Numel>
  ChunkMap(std::int64_t num_spans, Numel numel) {
    first_chunk_.reserve(num_spans + 1);
    numel_.reserve(num_spans);
    first_chunk_.push_back(0);
    for (std::int64_t span = 0; span < num_spans; ++span) {
      numel_.push_back(numel(span));
      elements_ += numel_.back();
      first_chunk_.push_back(first_chunk_.back() + chunks_of(numel_.back()));
    }
  }

  std::int64_t chunks() const { return first_chunk_.back(); }
  std::int64_t spans() const { return static_cast<std::int64_t>(numel_.size()); }
  const std::vector<std::int64_t>& first_chunk() const { return first_chunk_; }
  const std::vector<std::int64_t>& numel() const { return numel_; }

  // Chunks of one task: enough elements to be worth a thread.
  std::int64_t grain() const {
    constexpr std::int64_t kTaskElements = 32768;
    if (elements_ <= kTaskElements) return chunks() > 0 ? chunks() : 1;
    const std::int64_t tasks = elements_ / kTaskElements;
    return (chunks() + tasks - 1) / tasks;
  }

  // use(number, chunk) for the chunks numbered [begin, end), in order.
  template <class Use>
  void for_each(std::int64_t begin, std::int64_t end, Use use) const {
    if (begin >= end) return;
    std::int64_t span = span_of_chunk(first_chunk_.data(), spans(), begin);
    for (std::int64_t number = begin; number < end; ++number) {
      while (first_chunk_[span + 1] <= number) ++span;
      const std::int64_t offset = (number - first_chunk_[span]) * kChunk;
      const std::int64_t left = numel_[span] - offset;
      use(number, Chunk{span, offset, left < kChunk ? left : kChunk});
    }
  }

  // The same for all chunks, in parallel where the launch can.
  template <class Use>
  void parallel_for_each(const Launch& launch, Use use) const {
    struct Context {
      const ChunkMap* map;
      Use* use;
    } context{this, &use};
    const RangeBody body = [](void* opaque, std::int64_t begin, std::int64_t end) {
      auto* self = static_cast<Context*>(opaque);
      self->map->for_each(begin, end, *self->use);
    };
    if (chunks() == 0) return;
    if (launch.parallel_for == nullptr) {
      body(&context, 0, chunks());
    } else {
      launch.parallel_for(chunks(), grain(), body, &context);
    }
  }

 private:
  std::vector<std::int64_t> first_chunk_;
  std::vector<std::int64_t> numel_;
  std::int64_t elements_ = 0;
};

}  // namespace poise::kernels
