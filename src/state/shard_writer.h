// Writes one file of a rank's shard: copied into tiles by the caller, written by a stream; where
// the caller waits and the system copies what is written, straight from where it lies.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/digest.h"
#include "poise/stream.h"
#include "state/contents.h"
#include "state/files.h"
#include "state/staging.h"

namespace poise::state {

class ShardWriter {
 public:
  // A caller that waits makes the checksum while the stream waits for the disk, not where the
  // stream copies. One that goes on leaves all it can to the stream.
  enum class Caller { waits, goes_on };
  ShardWriter(std::string path, Staging& staging, Stream& stream, Caller caller);
  ~ShardWriter();

  // Whether the system copies what is written.
  bool copies() const { return file_->output.copies(); }

  // The file, but for the pieces that only the engine changes where the caller goes on.
  void write(const std::vector<Piece>& pieces, const std::map<std::string, std::string>& metadata);
  void wait_until_read();  // what was written has been read for the last time
  void write_rest();       // from any thread; what it writes has been read when it returns

  // On the stream, after everything: the file is on the disk. Throws Error where it is not.
  SavedFile finish();

 private:
  struct File {
    explicit File(const std::string& path) : output(path) {}
    void write_from_anywhere(const char* bytes, std::size_t size);
    OutputFile output;
    offload::Digest digest;
    std::uint64_t bytes = 0;
    std::optional<std::string> error;
  };
  struct Filled {
    Staging::Tile tile;
    std::size_t size = 0;
  };
  void append(const char* bytes, std::size_t size);
  void append(const Piece& piece);
  void append_tensor(const at::Tensor& flat);
  void append_span(const Piece& piece);
  void write_in_place(const at::Tensor& flat);
  char* room(std::size_t& size);  // in the present tile, up to `size` bytes; now taken
  void end_tile();
  void submit_filled();
  void submit(Filled filled);

  Staging& staging_;
  Stream& stream_;
  const Caller caller_;
  std::shared_ptr<File> file_;  // the stream's
  std::optional<Staging::Tile> tile_;
  std::size_t filled_ = 0;
  std::vector<Filled> waiting_;  // for the stream, which would take the caller's processors
  Event in_place_;               // all that the stream reads in place
  std::vector<Piece> rest_;
  Staging::Wait wait_ = Staging::Wait::interruptible;
};

}  // namespace poise::state
