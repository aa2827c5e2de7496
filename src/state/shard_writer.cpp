// Tiles of a file.
#include "state/shard_writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "poise/error.h"
#include "state/safetensors.h"

namespace poise::state {
namespace {

// By as many threads as torch has: a save in the background holds the training up for this long.
void copy(char* to, const char* from, std::size_t size) {
  constexpr std::int64_t kGrain = std::int64_t{1} << 20;
  at::parallel_for(0, static_cast<std::int64_t>(size), kGrain, [&](auto begin, auto end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
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
                        const std::map<std::string, std::string>& metadata) {
  auto ordered = pieces;  // wide types first: each tensor lies at a multiple of its element's size
  std::stable_sort(ordered.begin(), ordered.end(), [](const Piece& a, const Piece& b) {
    return a.values.element_size() > b.values.element_size();
  });
  std::vector<TensorEntry> entries;
  for (const auto& piece : ordered) {
    entries.push_back({key_of(piece), piece.values.scalar_type(), {piece.values.numel()}, 0, 0});
  }
  const auto header = write_header(entries, metadata);
  append(header.data(), header.size());
  for (const auto& piece : ordered) append(piece.values);
  if (filled_ > 0) submit();
}

char* ShardWriter::room(std::size_t& size) {
  if (tile_ && filled_ == kTile) submit();
  if (!tile_) tile_ = staging_.take();
  size = std::min(size, kTile - filled_);
  char* place = tile_->data + filled_;
  filled_ += size;
  return place;
}

void ShardWriter::append(const char* bytes, std::size_t size) {
  while (size > 0) {
    auto length = size;
    char* place = room(length);  // may be less
    copy(place, bytes, length);
    bytes += length;
    size -= length;
  }
}

void ShardWriter::append(const at::Tensor& flat) {
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
