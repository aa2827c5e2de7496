// Tiles of a file.
#include "state/shard_writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "poise/error.h"
#include "state/fast_copy.h"
#include "state/safetensors.h"

namespace poise::state {
namespace {

constexpr std::size_t kRun = std::size_t{256} << 10;
constexpr std::size_t kWorthIt = std::size_t{1} << 20;  // to be written apart from its neighbours

// So that the first of `later`, and with it all that follow, lies at a multiple of its element.
Piece padding_between(const std::vector<Piece>& now, const std::vector<Piece>& later) {
  std::int64_t bytes = 0, widest = 1;
  for (const auto& piece : now) bytes += piece.numel() * piece.element_size();
  for (const auto& piece : later) widest = std::max(widest, piece.element_size());
  const auto missing = (widest - bytes % widest) % widest;
  return {kPadding, "", 0, at::zeros({missing}, at::kByte)};
}

}  // namespace

ShardWriter::ShardWriter(std::string path, Staging& staging, Stream& stream, Caller caller)
    : staging_(staging), stream_(stream), caller_(caller), file_(std::make_shared<File>(path)) {}

ShardWriter::~ShardWriter() {
  if (tile_) staging_.give_back(std::move(*tile_));
  for (auto& one : waiting_) staging_.give_back(std::move(one.tile));
}

void ShardWriter::write(const std::vector<Piece>& pieces,
                        const std::map<std::string, std::string>& metadata) {
  const auto comes_later = [&](const Piece& piece) {
    return caller_ == Caller::goes_on && piece.engine_only;
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
  if (rest_.empty()) end_tile();
  submit_filled();
}

void ShardWriter::wait_until_read() { in_place_.synchronize(); }

void ShardWriter::write_rest() {
  if (rest_.empty()) return;
  wait_ = Staging::Wait::plain;
  for (const auto& piece : rest_) append(piece);
  rest_.clear();
  end_tile();
  submit_filled();
}

char* ShardWriter::room(std::size_t& size) {
  if (filled_ == kTile) end_tile();
  if (!tile_) tile_ = staging_.take_at_once();
  if (!tile_) {
    submit_filled();  // to get tiles back
    tile_ = staging_.take_when_back(wait_);
  }
  size = std::min(size, kTile - filled_);
  char* place = tile_->data + filled_;
  filled_ += size;
  return place;
}

void ShardWriter::append(const char* bytes, std::size_t size) {
  while (size > 0) {
    auto length = size;
    char* place = room(length);  // may be less
    if (caller_ == Caller::waits) {
      copy_by_threads(place, bytes, length);  // its checksum is next
    } else if (wait_ == Staging::Wait::interruptible) {
      copy_past_caches_by_threads(place, bytes, length);
    } else {
      copy_past_caches(place, bytes, length);  // the training has the other cores
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
    if (caller_ == Caller::waits && copies() && flat.nbytes() >= kWorthIt)
      return write_in_place(flat);
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

void ShardWriter::write_in_place(const at::Tensor& flat) {
  end_tile();
  submit_filled();
  in_place_ = stream_.submit([file = file_, flat] {
    try {
      if (file->error) return;
      file->write_from_anywhere(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
    } catch (const std::exception& error) {
      file->error = error.what();
    }
  });
}

// The checksum first, which brings a run into the cache that the copy is made from.
void ShardWriter::File::write_from_anywhere(const char* data, std::size_t size) {
  for (std::size_t at = 0; at < size; at += kRun) {
    const auto length = std::min(kRun, size - at);
    digest.update(data + at, length);
    output.write_from_anywhere(data + at, length);
    bytes += length;
  }
}

void ShardWriter::end_tile() {
  if (!tile_) return;
  waiting_.push_back({std::move(*tile_), std::exchange(filled_, 0)});
  tile_.reset();
  if (caller_ == Caller::waits || wait_ == Staging::Wait::plain) submit_filled();
}

void ShardWriter::submit_filled() {
  for (auto& one : std::exchange(waiting_, {})) submit(std::move(one));
}

void ShardWriter::submit(Filled filled) {
  const auto tile = std::make_shared<Staging::Tile>(std::move(filled.tile));
  const bool digest_here = caller_ == Caller::waits && !copies();
  if (digest_here) file_->digest.update(tile->data, filled.size);
  stream_.submit([file = file_, tile, size = filled.size, digest_here, &staging = staging_] {
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
