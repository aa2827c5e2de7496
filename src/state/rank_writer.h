// Writes what one rank brings to a save, and makes as many files of it as are worth it: where the
// system copies what is written, it copies into one file at a time, but into several at once.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "poise/stream.h"
#include "state/contents.h"
#include "state/manifest.h"
#include "state/shard_writer.h"
#include "state/staging.h"

namespace poise::state {

class RankWriter {
 public:
  // `stream` writes the first file, in `folder`; others get streams of their own.
  RankWriter(std::string folder, int rank, Staging& staging, Stream& stream,
             ShardWriter::Caller caller);

  // As those of ShardWriter.
  void write(const std::vector<Piece>& pieces, const std::map<std::string, std::string>& metadata);
  void write_rest();

  // On `stream`, after everything: all files are on the disk. Throws Error where one is not.
  std::vector<SavedFile> finish();

 private:
  void open(Stream& stream);
  std::int64_t files_for(const std::vector<Piece>& pieces) const;

  const std::string folder_;
  const int rank_;
  Staging& staging_;
  const ShardWriter::Caller caller_;
  std::vector<std::unique_ptr<ShardWriter>> files_;
  std::vector<std::unique_ptr<Stream>> streams_;  // of all but the first; end before what they use
};

}  // namespace poise::state
