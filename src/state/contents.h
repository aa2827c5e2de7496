// What a rank brings to a save.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "poise/offload.h"
#include "state/manifest.h"

namespace poise::state {

// Kinds of pieces. A moment is kMoment with its number behind it.
inline constexpr char kMaster[] = "master";  // fp32
inline constexpr char kMoment[] = "moment";  // fp32
inline constexpr char kValue[] = "value";    // of a frozen parameter, in the type it is kept in
inline constexpr char kBuffer[] = "buffer";
inline constexpr char kRandom[] = "random";  // state of a generator, named by its device
// Bytes before which wider elements would not lie at a multiple of their size; of no meaning.
inline constexpr char kPadding[] = "padding";

std::string moment(std::int64_t number);

// Elements [begin, begin + numel()) of a named tensor, in the order in which they lie in memory.
struct Piece {
  std::string kind;
  std::string name;
  std::int64_t begin = 0;
  at::Tensor values;  // contiguous, any device; undefined: they are in `span`, from `first` on
  offload::SpanPtr span = {};
  std::int64_t first = 0, in_span = 0;
  // Nobody but the engine changes them, and it waits: they may be read after save() has returned.
  bool engine_only = false;

  std::int64_t numel() const { return values.defined() ? values.numel() : in_span; }
  at::ScalarType type() const { return values.defined() ? values.scalar_type() : span->dtype(); }
  std::int64_t element_size() const { return static_cast<std::int64_t>(c10::elementSize(type())); }
};

// The name of a piece's tensor in its file: "master@256:blocks.0.weight".
std::string key_of(const Piece& piece);
struct PieceKey {
  std::string kind;
  std::int64_t begin = 0;
  std::string name;
};
PieceKey key_from(const std::string& key, const std::string& file);

struct Contents {
  Manifest manifest;          // without its files; rank 0's counts
  std::vector<Piece> pieces;  // this rank's share of the parameters, and its generators
  std::vector<Piece> buffers;
};

}  // namespace poise::state
