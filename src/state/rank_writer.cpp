// How many files, and which piece goes into which.
#include "state/rank_writer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "state/directory.h"
#include "state/files.h"

namespace poise::state {
namespace {

constexpr std::int64_t kMostFiles = 4;
constexpr std::int64_t kWorthAFile = std::int64_t{16} << 20;  // bytes

std::int64_t bytes_of(const Piece& piece) { return piece.numel() * piece.element_size(); }

std::int64_t bytes_of(const std::vector<Piece>& pieces) {
  std::int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += bytes_of(piece);
  return bytes;
}

// Neighbours stay together: who reads one after another has one file open.
std::vector<std::vector<Piece>> split(const std::vector<Piece>& pieces, std::int64_t files) {
  std::vector<std::vector<Piece>> parts(static_cast<std::size_t>(files));
  const auto all = std::max<std::int64_t>(1, bytes_of(pieces));
  std::int64_t before = 0;
  for (const auto& piece : pieces) {
    const auto middle = before + bytes_of(piece) / 2;
    parts[static_cast<std::size_t>(std::min(files - 1, middle * files / all))].push_back(piece);
    before += bytes_of(piece);
  }
  return parts;
}

}  // namespace

RankWriter::RankWriter(std::string folder, int rank, Staging& staging, Stream& stream,
                       ShardWriter::Caller caller)
    : folder_(std::move(folder)), rank_(rank), staging_(staging), caller_(caller) {
  open(stream);
}

void RankWriter::open(Stream& stream) {
  const auto name = shard_name(rank_, static_cast<int>(files_.size()));
  files_.push_back(std::make_unique<ShardWriter>(in(folder_, name), staging_, stream, caller_));
}

std::int64_t RankWriter::files_for(const std::vector<Piece>& pieces) const {
  if (caller_ != ShardWriter::Caller::waits || !files_.front()->copies()) return 1;
  const auto most = std::min<std::int64_t>(kMostFiles, at::get_num_threads());
  return std::clamp<std::int64_t>(bytes_of(pieces) / kWorthAFile, 1, most);
}

void RankWriter::write(const std::vector<Piece>& pieces,
                       const std::map<std::string, std::string>& metadata) {
  const auto parts = split(pieces, files_for(pieces));
  while (files_.size() < parts.size()) {
    streams_.push_back(std::make_unique<Stream>());
    open(*streams_.back());
  }
  for (std::size_t i = 0; i < parts.size(); ++i) files_[i]->write(parts[i], metadata);
  for (const auto& file : files_) file->wait_until_read();
}

void RankWriter::write_rest() { files_.front()->write_rest(); }

std::vector<SavedFile> RankWriter::finish() {
  for (const auto& stream : streams_) stream->submit([] {}).synchronize_on_worker();
  std::vector<SavedFile> made;
  for (const auto& file : files_) {
    made.push_back(file->finish());
  }
  return made;
}

}  // namespace poise::state
