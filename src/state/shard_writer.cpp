// Tiles of a file.
#include "state/shard_writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "poise/error.h"
#include "state/safetensors.h"

namespace poise::state {
namespace {

// By as many threads as torch has: the training waits for it.
void copy_fast(char* to, const char* from, std::size_t size) {
  constexpr std::int64_t kGrain = std::int64_t{1} << 20;
  at::parallel_for(0, static_cast<std::int64_t>(size), kGrain, [&](auto begin, auto end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

// So that the first of `later`, and with it all that follow, lies at a multiple of its element.
Piece padding_between(const std::vector<Piece>& now, const std::vector<Piece>& later) {
  std::int64_t bytes = 0, widest = 1;
  for (const auto& piece : now) bytes += piece.numel() * piece.element_size();
  for (const auto& piece : later) widest = std::max(widest, piece.element_size());
  const auto missing = (widest - bytes % widest) % widest;
  return {kPadding, "", 0, at::zeros({missing}, at::kByte)};
}

}  // namespace

ShardWriter::ShardWriter(std::string path, Staging& staging, Stream& stream, DigestBy digest_by)
    : staging_(staging),
      stream_(stream),
      digest_by_(digest_by),
      file_(std::make_shared<File>(path)) {}

ShardWriter::~ShardWriter() {
  if (tile_) staging_.give_back(std::move(*tile_));
}

void ShardWriter::write(const std::vector<Piece>& pieces,
                        const std::map<std::string, std::string>& metadata,
                        EngineOnly engine_only) {
  const auto comes_later = [&](const Piece& piece) {
    return engine_only == EngineOnly::later && piece.engine_only;
  };
  // Wide types first: each tensor lies at a multiple of its element's size.
  auto now = pieces;
  std::stable_sort(now.begin(), now.end(), [](const Piece& a, const Piece& b) {
    return a.element_size() > b.element_size();
  });
  const auto later = std::stable_partition(now.begin(), now.end(),
                                           [&](const Piece& piece) { return !comes_later(piece); });
  rest_.assign(later, now.end());
  now.erase(later, now.end());
  if (!rest_.empty()) {
    if (const auto padding = padding_between(now, rest_); padding.numel() > 0) {
      now.push_back(padding);
    }
  }
  std::vector<TensorEntry> entries;
  for (const auto* some : {&now, &rest_}) {
    for (const auto& piece : *some) {
      entries.push_back({key_of(piece), piece.type(), {piece.numel()}, 0, 0});
    }
  }
  const auto header = write_header(entries, metadata);
  append(header.data(), header.size());
  for (const auto& piece : now) append(piece);
  if (rest_.empty() && filled_ > 0) submit();
}

void ShardWriter::write_rest() {
  if (rest_.empty()) return;
  wait_ = Staging::Wait::plain;
  for (const auto& piece : rest_) append(piece);
  rest_.clear();
  submit();
}

char* ShardWriter::room(std::size_t& size) {
  if (tile_ && filled_ == kTile) submit();
  if (!tile_) tile_ = staging_.take(wait_);
  size = std::min(size, kTile - filled_);
  char* place = tile_->data + filled_;
  filled_ += size;
  return place;
}

void ShardWriter::append(const char* bytes, std::size_t size) {
  while (size > 0) {
    auto length = size;
    char* place = room(length);  // may be less
    if (wait_ == Staging::Wait::interruptible) {
      copy_fast(place, bytes, length);
    } else {
      std::memcpy(place, bytes, length);  // the training has the other cores
    }
    bytes += length;
    size -= length;
  }
}

void ShardWriter::append(const Piece& piece) {
  piece.values.defined() ? append_tensor(piece.values) : append_span(piece);
}

// From a file, for example: tile by tile, never whole.
void ShardWriter::append_span(const Piece& piece) {
  const auto element = static_cast<std::size_t>(piece.element_size());
  for (std::int64_t at = 0; at < piece.in_span;) {
    auto length = static_cast<std::size_t>(piece.in_span - at) * element;
    char* place = room(length);
    POISE_CHECK(length % element == 0, length, ' ', element);
    const auto count = static_cast<std::int64_t>(length / element);
    piece.span->read(piece.first + at, at::from_blob(place, {count}, piece.type()));
    at += count;
  }
}

void ShardWriter::append_tensor(const at::Tensor& flat) {
  POISE_CHECK(flat.is_contiguous());
  if (flat.is_cpu()) {
    return append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  }
  at::NoGradGuard no_grad;
  const auto bytes = flat.detach().reshape({-1}).view(at::kByte);
  for (std::int64_t at = 0; at < bytes.numel();) {
    auto length = static_cast<std::size_t>(bytes.numel() - at);
    char* place = room(length);
    const auto part = static_cast<std::int64_t>(length);
    at::from_blob(place, {part}, at::kByte).copy_(bytes.narrow(0, at, part));
    at += part;
  }
}

void ShardWriter::submit() {
  auto tile = std::make_shared<Staging::Tile>(std::move(*tile_));
  tile_.reset();
  const auto size = std::exchange(filled_, 0);
  const bool digest_here = digest_by_ == DigestBy::caller;
  if (digest_here) file_->digest.update(tile->data, size);
  stream_.submit([file = file_, tile, size, digest_here, &staging = staging_] {
    try {
      if (!file->error) {
        if (!digest_here) file->digest.update(tile->data, size);
        file->output.write(tile->data, size);
        file->bytes += size;
      }
    } catch (const std::exception& error) {  // told by finish(): later tiles must come back, too
      file->error = error.what();
    }
    staging.give_back(std::move(*tile));
  });
}

SavedFile ShardWriter::finish() {
  if (file_->error) throw Error(*file_->error);
  file_->output.finish();
  SavedFile made;
  made.bytes = file_->bytes;
  made.digest = file_->digest.value();
  return made;
}

}  // namespace poise::state
