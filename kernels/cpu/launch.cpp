// The CPU back end: cuts the work into chunks, runs them in parallel, joins sums in chunk order.
#include <algorithm>

#include "kernels/backends.h"
#include "kernels/chunks.h"
#include "kernels/cpu/loops.h"
#include "kernels/digest.h"
#include "kernels/stream.h"

namespace poise::kernels::cpu {
namespace {

// out[s] = the sums of span s's chunks, in chunk order.
void join_chunks(const ChunkMap& map, const std::vector<double>& sums, double* out) {
  for (std::int64_t s = 0; s < map.spans(); ++s) {
    double sum = 0;
    for (std::int64_t c = map.first_chunk()[s]; c < map.first_chunk()[s + 1]; ++c) sum += sums[c];
    out[s] = sum;
  }
}

// use(i) for i in [0, count), where the launch can in parallel.
template <class Use>
void in_parallel(const Launch& launch, std::int64_t count, Use use) {
  const RangeBody body = [](void* context, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) (*static_cast<Use*>(context))(i);
  };
  if (launch.parallel_for == nullptr || count <= 1) return body(&use, 0, count);
  launch.parallel_for(count, 1, body, &use);
}

// use(segment, begin, count) for the chunks of all segments.
template <class Segment, class Use>
void each_chunk(const Launch& launch, const Segment* segments, std::int64_t num_segments, Use use) {
  const ChunkMap map(num_segments,
                     [&](std::int64_t s) { return segments[s].end - segments[s].begin; });
  map.parallel_for_each(launch, [&](std::int64_t, const Chunk& chunk) {
    const Segment& segment = segments[chunk.span];
    use(segment, segment.begin + chunk.offset, chunk.count);
  });
}

RandomPlace place_of(const RoundedSegment& segment, std::int64_t begin) {
  return {random_key(segment.key), segment.first + begin - segment.begin};
}

template <class Loop, class Arrays>
void adamw_low(Loop loop, const Launch& launch, const Arrays& arrays,
               const RoundedSegment* segments, std::int64_t num_segments,
               const AdamSettings& settings) {
  each_chunk(launch, segments, num_segments,
             [&](const RoundedSegment& s, std::int64_t begin, std::int64_t count) {
               loop(arrays, begin, count, adam_constants(settings, s.lr, s.weight_decay),
                    settings.decoupled, place_of(s, begin));
             });
}

}  // namespace

void squared_norms(const Launch& launch, DType dtype, const void* base, const Piece* pieces,
                   std::int64_t num_pieces, double* out) {
  const Loops& loop = loops();
  const ChunkMap map(num_pieces, [&](std::int64_t p) { return pieces[p].end - pieces[p].begin; });
  std::vector<double> sums(map.chunks());
  map.parallel_for_each(launch, [&](std::int64_t number, const Chunk& chunk) {
    sums[number] =
        loop.squared_norm(dtype, base, pieces[chunk.span].begin + chunk.offset, chunk.count);
  });
  join_chunks(map, sums, out);
}

void accumulate(const Launch& launch, Accumulate mode, float* accumulator, DType gradient_dtype,
                const void* gradient, std::int64_t numel, float weight, double* sum_of_squares) {
  const Loops& loop = loops();
  const bool with_norm = sum_of_squares != nullptr;
  const ChunkMap map(1, [&](std::int64_t) { return numel; });
  std::vector<double> sums(with_norm ? map.chunks() : 0);
  map.parallel_for_each(launch, [&](std::int64_t number, const Chunk& chunk) {
    const double sum = loop.accumulate(mode, accumulator, gradient_dtype, gradient, chunk.offset,
                                       chunk.count, weight, with_norm);
    if (with_norm) sums[number] = sum;
  });
  if (!with_norm) return;
  *sum_of_squares = 0;
  for (const double sum : sums) *sum_of_squares += sum;
}

void adamw(const Launch& launch, const AdamArrays& arrays, const AdamSegment* segments,
           std::int64_t num_segments, const AdamSettings& settings) {
  const Loops& loop = loops();
  each_chunk(launch, segments, num_segments,
             [&](const AdamSegment& s, std::int64_t begin, std::int64_t count) {
               loop.adamw(arrays, begin, count, adam_constants(settings, s.lr, s.weight_decay),
                          settings.decoupled);
             });
}

void adamw_bf16(const Launch& launch, const AdamBf16Arrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  adamw_low(loops().adamw_bf16, launch, arrays, segments, num_segments, settings);
}

void adamw_8bit(const Launch& launch, const Adam8BitArrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  adamw_low(loops().adamw_8bit, launch, arrays, segments, num_segments, settings);
}

// Segment by segment, so that the sums of its chunks are not many at once.
void factor_sums(const Launch& launch, const FactoredArrays& arrays,
                 const FactoredSegment* segments, std::int64_t num_segments, double factor,
                 double* sums) {
  const Loops& loop = loops();
  for (std::int64_t s = 0; s < num_segments; ++s) {
    const FactoredSegment& segment = segments[s];
    const FactorLayout& layout = segment.layout;
    const FactoredConstants constants = factored_constants(segment, factor);
    const std::int64_t numel = segment.end - segment.begin, length = factor_chunk(segment);
    const std::int64_t chunks = (numel + length - 1) / length;
    const std::int64_t each = layout.num_rows + layout.num_columns;
    std::vector<double> parts(static_cast<std::size_t>(chunks * each));
    in_parallel(launch, chunks, [&](std::int64_t c) {
      const std::int64_t offset = c * length;
      double* rows = parts.data() + c * each;
      loop.factor_sum(arrays, layout, segment.begin + offset, segment.first + offset,
                      std::min(length, numel - offset), constants, rows, rows + layout.num_rows);
    });
    for (std::int64_t c = 0; c < chunks; ++c) {
      for (std::int64_t k = 0; k < each; ++k) sums[layout.rows + k] += parts[c * each + k];
    }
  }
}

void factored_squares(const Launch& launch, const FactoredArrays& arrays,
                      const FactoredSegment* segments, std::int64_t num_segments, double factor,
                      double* squares) {
  const Loops& loop = loops();
  const ChunkMap map(num_segments,
                     [&](std::int64_t s) { return segments[s].end - segments[s].begin; });
  std::vector<double> sums(map.chunks());
  map.parallel_for_each(launch, [&](std::int64_t number, const Chunk& chunk) {
    const FactoredSegment& segment = segments[chunk.span];
    sums[number] = loop.factored_square(arrays, segment.layout, segment.begin + chunk.offset,
                                        segment.first + chunk.offset, chunk.count,
                                        factored_constants(segment, factor));
  });
  join_chunks(map, sums, squares);
}

void adafactor(const Launch& launch, const FactoredArrays& arrays, const FactoredSegment* segments,
               std::int64_t num_segments, double factor) {
  const Loops& loop = loops();
  const ChunkMap map(num_segments,
                     [&](std::int64_t s) { return segments[s].end - segments[s].begin; });
  map.parallel_for_each(launch, [&](std::int64_t, const Chunk& chunk) {
    const FactoredSegment& segment = segments[chunk.span];
    loop.adafactor(arrays, segment.layout, segment.begin + chunk.offset,
                   segment.first + chunk.offset, chunk.count, factored_constants(segment, factor));
  });
}

void lamb_squares(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
                  std::int64_t num_segments, const AdamSettings& settings, double* squares) {
  const Loops& loop = loops();
  const ChunkMap map(num_segments,
                     [&](std::int64_t s) { return segments[s].end - segments[s].begin; });
  std::vector<double> sums(map.chunks());
  map.parallel_for_each(launch, [&](std::int64_t number, const Chunk& chunk) {
    const LambSegment& segment = segments[chunk.span];
    sums[number] = loop.lamb_square(arrays, segment.begin + chunk.offset, chunk.count,
                                    lamb_constants(settings, segment));
  });
  join_chunks(map, sums, squares);
}

void lamb(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
          std::int64_t num_segments, const AdamSettings& settings) {
  const Loops& loop = loops();
  each_chunk(launch, segments, num_segments,
             [&](const LambSegment& s, std::int64_t begin, std::int64_t count) {
               loop.lamb(arrays, begin, count, lamb_constants(settings, s));
             });
}

void lars(const Launch& launch, const LarsArrays& arrays, const LarsSegment* segments,
          std::int64_t num_segments, const LarsSettings& settings) {
  const Loops& loop = loops();
  each_chunk(launch, segments, num_segments,
             [&](const LarsSegment& s, std::int64_t begin, std::int64_t count) {
               loop.lars(arrays, begin, count, lars_constants(settings, s.lr, s.weight_decay));
             });
}

void lion(const Launch& launch, const LionArrays& arrays, const LionSegment* segments,
          std::int64_t num_segments, const LionSettings& settings) {
  const Loops& loop = loops();
  each_chunk(launch, segments, num_segments,
             [&](const LionSegment& s, std::int64_t begin, std::int64_t count) {
               loop.lion(arrays, begin, count, lion_constants(settings, s.lr, s.weight_decay));
             });
}

void lion_8bit(const Launch& launch, const Lion8BitArrays& arrays, const RoundedSegment* segments,
               std::int64_t num_segments, const LionSettings& settings) {
  const Loops& loop = loops();
  each_chunk(launch, segments, num_segments,
             [&](const RoundedSegment& s, std::int64_t begin, std::int64_t count) {
               loop.lion_8bit(arrays, begin, count, lion_constants(settings, s.lr, s.weight_decay),
                              place_of(s, begin));
             });
}

void sgd(const Launch& launch, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  const Loops& loop = loops();
  each_chunk(launch, segments, num_segments,
             [&](const SgdSegment& s, std::int64_t begin, std::int64_t count) {
               loop.sgd(arrays, begin, count, sgd_constants(settings, s.lr, s.weight_decay));
             });
}

void pack(const Launch& launch, DType source_dtype, DType target_dtype, const PackPiece* pieces,
          std::int64_t num_pieces, float scale) {
  const Loops& loop = loops();
  const ChunkMap map(num_pieces, [&](std::int64_t p) { return pieces[p].numel; });
  map.parallel_for_each(launch, [&](std::int64_t, const Chunk& chunk) {
    const PackPiece& piece = pieces[chunk.span];
    loop.pack(source_dtype, target_dtype, piece.source, piece.target, chunk.offset, chunk.count,
              scale);
  });
}

}  // namespace poise::kernels::cpu

namespace poise::kernels {

std::uint64_t digest(const void* data, std::size_t size) { return cpu::loops().digest(data, size); }

void digest_begin(DigestState& state) { cpu::loops().digest_begin(state); }

void digest_update(DigestState& state, const void* data, std::size_t size) {
  cpu::loops().digest_update(state, data, size);
}

std::uint64_t digest_value(const DigestState& state) { return cpu::loops().digest_value(state); }

std::uint32_t stream_read(const Launch& launch, const float* array, std::int64_t numel) {
  const cpu::Loops& loop = cpu::loops();
  const ChunkMap map(1, [&](std::int64_t) { return numel; });
  std::vector<std::uint32_t> words(map.chunks());
  map.parallel_for_each(launch, [&](std::int64_t number, const Chunk& chunk) {
    words[number] = loop.stream_read(array, chunk.offset, chunk.count);
  });
  std::uint32_t bits = 0;
  for (const std::uint32_t word : words) bits ^= word;
  return bits;
}

void stream_update(const Launch& launch, const AdamArrays& arrays, std::int64_t numel) {
  const cpu::Loops& loop = cpu::loops();
  const ChunkMap map(1, [&](std::int64_t) { return numel; });
  map.parallel_for_each(launch, [&](std::int64_t, const Chunk& chunk) {
    loop.stream_update(arrays, chunk.offset, chunk.count);
  });
}

}  // namespace poise::kernels
