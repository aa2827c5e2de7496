// Blocks in flight: how each begins, what its result means, and when it is over.
#include "offload/lane.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "kernels/digest.h"
#include "poise/error.h"

namespace poise::offload {
namespace {

std::uint64_t checksum(const BlockRequest& request) {
  return std::clamp<std::uint64_t>(
      kernels::digest(request.data, static_cast<std::size_t>(request.bytes)), Room::kNone + 1,
      Room::kLost - 1);
}

}  // namespace

// Bytes [begin, end) of a room to or from memory that starts with byte `begin`.
struct Lane::Transfer {
  Room& room;
  std::int64_t begin, end;
  char* to;          // of a read
  const char* from;  // of a write

  std::int64_t low(std::int64_t block, std::int64_t size) const {
    return std::max(begin, block * size);
  }
  std::int64_t high(std::int64_t block, std::int64_t size) const {
    return std::min(end, (block + 1) * size);
  }
  std::uint64_t checksum(std::int64_t block) const {
    return room.checksums[static_cast<std::size_t>(block)];
  }
  // Nothing of what the block held before stays.
  bool fills(std::int64_t block, std::int64_t size) const {
    return begin <= block * size && end >= std::min((block + 1) * size, room.used);
  }
};

Lane::Lane(ScratchFile& file, const at::Tensor& buffers, std::int64_t block_bytes,
           const MakeIo& make)
    : file_(file), memory_(buffers), block_bytes_(block_bytes) {
  auto* data = static_cast<char*>(buffers.mutable_data_ptr());
  std::vector<iovec> places;
  for (std::int64_t at = 0; at < static_cast<std::int64_t>(buffers.nbytes()); at += block_bytes) {
    places.push_back({data + at, static_cast<std::size_t>(block_bytes)});
    Flight flight;
    flight.request.buffer = static_cast<int>(flights_.size());
    flight.buffer = data + at;
    flights_.push_back(flight);
  }
  io_ = make(places);
}

void Lane::begin_anew() {
  if (!last_.done()) return;
  try {
    last_.synchronize_on_worker();
  } catch (...) {  // those who wait for it have it, too
    last_ = {};
    try {
      stream_.synchronize();
    } catch (...) {
      // The same: a stream says it once, and is usable then.
    }
  }
}

void Lane::read(Room& room, std::int64_t begin, std::int64_t end, char* to) {
  Transfer transfer{room, begin, end, to, nullptr};
  run(transfer);
}

void Lane::write(Room& room, std::int64_t begin, std::int64_t end, const char* from) {
  Transfer transfer{room, begin, end, nullptr, from};
  run(transfer);
}

void Lane::run(Transfer& transfer) {
  const FileSizeSignalBlocked blocked;
  std::vector<int> free;
  for (int i = static_cast<int>(flights_.size()) - 1; i >= 0; --i) free.push_back(i);
  std::size_t in_flight = 0;
  std::int64_t next = transfer.begin / block_bytes_;
  const std::int64_t last = (transfer.end - 1) / block_bytes_;
  std::exception_ptr failure;  // the first; buffers in flight are the system's until they are back
  const auto attempt = [&](auto&& action) {
    try {
      return action();
    } catch (...) {
      if (!failure) failure = std::current_exception();
      return false;
    }
  };
  while (in_flight > 0 || (next <= last && !failure)) {
    while (next <= last && !free.empty() && !failure) {
      const std::int64_t block = next++;
      if (transfer.from == nullptr && transfer.checksum(block) == Room::kNone) {
        const auto low = transfer.low(block, block_bytes_),
                   high = transfer.high(block, block_bytes_);
        std::memset(transfer.to + (low - transfer.begin), 0, static_cast<std::size_t>(high - low));
        continue;
      }
      const bool begun = attempt([&] {
        begin_block(transfer, block, free.back());
        return true;
      });
      if (!begun) break;
      free.pop_back();
      ++in_flight;
    }
    if (in_flight == 0) continue;
    const auto result = io_->wait();
    auto& flight = flights_[static_cast<std::size_t>(result.buffer)];
    const bool goes_on =
        attempt([&] { return again(flight, result.result) || finish_block(transfer, flight); });
    if (goes_on) continue;
    free.push_back(result.buffer);
    --in_flight;
  }
  if (failure) std::rethrow_exception(failure);
}

std::int64_t Lane::bytes_of(const Room& room, std::int64_t block) const {
  return std::min(block_bytes_, room.bytes - block * block_bytes_);
}

// A write that covers its block in part reads the block first, unless nothing was written there.
void Lane::begin_block(Transfer& transfer, std::int64_t block, int buffer) {
  auto& flight = flights_[static_cast<std::size_t>(buffer)];
  flight.block = block;
  auto& request = flight.request;
  request.file = file_.descriptor();
  request.write = false;
  request.bytes = bytes_of(transfer.room, block);
  request.offset = transfer.room.begin + block * block_bytes_;
  const auto covered = transfer.high(block, block_bytes_) - transfer.low(block, block_bytes_);
  char* memory = const_cast<char*>(transfer.from != nullptr ? transfer.from : transfer.to) +
                 (transfer.low(block, block_bytes_) - transfer.begin);
  request.inside =
      covered < request.bytes || reinterpret_cast<std::uintptr_t>(memory) % kSector != 0;
  request.data = request.inside ? flight.buffer : memory;
  const bool keeps = transfer.from != nullptr && !transfer.fills(block, block_bytes_) &&
                     transfer.checksum(block) != Room::kNone;
  if (transfer.from == nullptr || keeps) {
    if (transfer.checksum(block) == Room::kLost) {
      fail("offload", "the ", request.bytes, " bytes at offset ", request.offset, " of ",
           file_.label(),
           " were lost when a write failed before; make the engine anew, from the start or a saved "
           "state");
    }
    flight.progress = Request(request.bytes);
    start(flight);
    return;
  }
  if (covered < request.bytes) {
    std::memset(request.data, 0, static_cast<std::size_t>(request.bytes));
  }
  fill_and_write(transfer, flight);
}

void Lane::fill_and_write(Transfer& transfer, Flight& flight) {
  const auto low = transfer.low(flight.block, block_bytes_);
  const auto high = transfer.high(flight.block, block_bytes_);
  if (flight.request.inside) {
    std::memcpy(flight.buffer + (low - flight.block * block_bytes_),
                transfer.from + (low - transfer.begin), static_cast<std::size_t>(high - low));
  }
  flight.request.write = true;
  flight.progress = Request(flight.request.bytes, true);
  start(flight);
  flight.sum = checksum(flight.request);  // while it travels
}

void Lane::start(Flight& flight) {
  auto request = flight.request;
  request.data += flight.progress.moved();
  request.offset += flight.progress.moved();
  request.bytes = flight.progress.left();
  io_->start(request);
}

// Whether the request was started again: it came back short, or the system asked to.
bool Lane::again(Flight& flight, std::int64_t result) {
  const bool was_direct = file_.file().direct();
  const auto next = flight.progress.answered(result, file_.file());
  if (was_direct && !file_.file().direct()) file_.note_refusal();
  if (next == Request::Next::failed) fail_request(flight);
  if (next == Request::Next::again) start(flight);
  return next == Request::Next::again;
}

// The request is over. True where a write follows in the same buffer.
bool Lane::finish_block(Transfer& transfer, Flight& flight) {
  const auto& request = flight.request;
  auto& sum = transfer.room.checksums[static_cast<std::size_t>(flight.block)];
  if (request.write) {
    sum = flight.sum;
    return false;
  }
  if (checksum(request) != sum) {
    fail("offload", "the ", request.bytes, " bytes at offset ", request.offset, " of ",
         file_.label(),
         " are not those that were written: the file was changed or the disk lost them; go on from "
         "a saved state, with offload.directory on another disk");
  }
  if (transfer.from != nullptr) {
    fill_and_write(transfer, flight);
    return true;
  }
  if (!request.inside) return false;  // it is where it belongs
  const auto low = transfer.low(flight.block, block_bytes_);
  const auto high = transfer.high(flight.block, block_bytes_);
  std::memcpy(transfer.to + (low - transfer.begin),
              flight.buffer + (low - flight.block * block_bytes_),
              static_cast<std::size_t>(high - low));
  return false;
}

void Lane::fail_request(const Flight& flight) const {
  const auto& request = flight.request;
  const int error = flight.progress.error();
  const auto moved = flight.progress.moved();
  const std::string why = error != 0      ? std::strerror(error)
                          : request.write ? join("the system took only ", moved)
                                          : join("it ends after ", moved, " of them");
  fail("offload", "cannot ", request.write ? "write " : "read ", request.bytes, " bytes at offset ",
       request.offset, " of ", file_.label(), ": ", why, "; ",
       error != 0 || request.write ? advice_for(error)
                                   : "the file was cut short: go on from a saved state");
}

}  // namespace poise::offload
