// Writes one rank's shard: copied into tiles by the caller, written by a stream.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "poise/stream.h"
#include "state/contents.h"
#include "state/digest.h"
#include "state/files.h"
#include "state/staging.h"

namespace poise::state {

class ShardWriter {
 public:
  // Whose time the checksum takes: the caller's, while the disk is busy, where it waits for the
  // save anyway; else the stream's.
  enum class DigestBy { caller, stream };
  ShardWriter(std::string path, Staging& staging, Stream& stream, DigestBy digest_by);
  ~ShardWriter();

  // The file but for the pieces that only the engine changes, where they may come `later`. What is
  // written has been read for the last time when a call returns.
  enum class EngineOnly { now, later };
  void write(const std::vector<Piece>& pieces, const std::map<std::string, std::string>& metadata,
             EngineOnly engine_only);
  void write_rest();  // from any thread

  // On the stream, after everything: the file is on the disk. Throws Error where it is not.
  SavedFile finish();

 private:
  struct File {
    explicit File(const std::string& path) : output(path) {}
    OutputFile output;
    Digest digest;
    std::uint64_t bytes = 0;
    std::optional<std::string> error;
  };
  void append(const char* bytes, std::size_t size);
  void append(const Piece& piece);
  void append_tensor(const at::Tensor& flat);
  void append_span(const Piece& piece);
  char* room(std::size_t& size);  // in the present tile, up to `size` bytes; now taken
  void submit();

  Staging& staging_;
  Stream& stream_;
  const DigestBy digest_by_;
  std::shared_ptr<File> file_;  // the stream's
  std::optional<Staging::Tile> tile_;
  std::size_t filled_ = 0;
  std::vector<Piece> rest_;
  Staging::Wait wait_ = Staging::Wait::interruptible;
};

}  // namespace poise::state
