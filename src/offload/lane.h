// Part of one direction of a file store: a stream whose operations move whole blocks between a file
// and memory, several in flight, every result read. Whole blocks of memory that starts at a page go
// as they are, others through buffers.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "offload/block_io.h"
#include "offload/scratch_file.h"
#include "poise/offload.h"

namespace poise::offload {

// A span's room in the file, in blocks. Blocks that were never written read as zero and have no
// checksum; those that a write was to fill that failed cannot be read until they are written whole.
// Lanes may write different blocks at once, never one that another works on.
struct Room {
  static constexpr std::uint64_t kNone = 0, kLost = ~std::uint64_t{0};  // checksums of no block

  std::int64_t begin = 0;                // byte in the file, a multiple of kSector
  std::int64_t bytes = 0;                // a multiple of kSector
  std::int64_t used = 0;                 // bytes that are the span's, the others being padding
  std::vector<std::uint64_t> checksums;  // by block; kNone: never written
};

using MakeIo = std::function<std::unique_ptr<BlockIo>(const std::vector<iovec>& buffers)>;

class Lane {
 public:
  // `buffers`: queue depth x block bytes, page-aligned.
  Lane(ScratchFile& file, const at::Tensor& buffers, std::int64_t block_bytes, const MakeIo& make);

  Stream& stream() { return stream_; }
  Event submit(Stream::Work work) { return last_ = stream_.submit(std::move(work)); }
  // Where a failure is all over, the next operation runs: what it left unwritten says so itself.
  void begin_anew();
  std::int64_t block_bytes() const { return block_bytes_; }
  const char* io_name() const { return io_->name(); }

  // Run on the stream's worker: bytes [begin, end) of the room. Throw Error after everything in
  // flight has come back.
  void read(Room& room, std::int64_t begin, std::int64_t end, char* to);
  void write(Room& room, std::int64_t begin, std::int64_t end, const char* from);

 private:
  struct Transfer;
  // What a buffer is used for.
  struct Flight {
    char* buffer = nullptr;
    BlockRequest request;
    std::int64_t block = 0;
    std::uint64_t sum = 0;  // of a block that is written
    Request progress;
  };
  void run(Transfer& transfer);
  void begin_block(Transfer& transfer, std::int64_t block, int buffer);
  void fill_and_write(Transfer& transfer, Flight& flight);
  bool finish_block(Transfer& transfer, Flight& flight);
  void start(Flight& flight);
  bool again(Flight& flight, std::int64_t result);
  std::int64_t bytes_of(const Room& room, std::int64_t block) const;
  [[noreturn]] void fail_request(const Flight& flight) const;

  ScratchFile& file_;
  const at::Tensor memory_;
  const std::int64_t block_bytes_;
  std::vector<Flight> flights_;  // by buffer
  std::unique_ptr<BlockIo> io_;
  Event last_;     // that was submitted
  Stream stream_;  // last: its worker uses the others until it is joined
};

}  // namespace poise::offload
