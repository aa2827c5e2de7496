#include "transfers.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

namespace pretend_gpu {
namespace {

struct Bfloat16 {
  std::uint16_t bits;
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    std::uint32_t whole;
    std::memcpy(&whole, &value, sizeof(whole));
    const bool nan = value != value;
    bits = static_cast<std::uint16_t>(nan ? 0x7FC0 : (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16);
  }
  operator float() const {
    const std::uint32_t whole = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &whole, sizeof(value));
    return value;
  }
};

// visit(a value of the type).
template <class Visit>
void with_type(ncclDataType_t type, Visit visit) {
  switch (type) {
    case ncclInt8:
      return visit(std::int8_t{});
    case ncclUint8:
      return visit(std::uint8_t{});
    case ncclInt32:
      return visit(std::int32_t{});
    case ncclUint32:
      return visit(std::uint32_t{});
    case ncclInt64:
      return visit(std::int64_t{});
    case ncclUint64:
      return visit(std::uint64_t{});
    case ncclFloat16:
      return visit(_Float16{});
    case ncclBfloat16:
      return visit(Bfloat16{});
    case ncclFloat32:
      return visit(float{});
    case ncclFloat64:
      return visit(double{});
    default:
      return;
  }
}

template <class T>
T combined(T a, T b, ncclRedOp_t operation) {
  switch (operation) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return static_cast<T>(a + b);
  }
}

// In rank order, and rounded to the type after each, as every step of a ring rounds.
template <class T>
void reduce(const Peers& peers, std::size_t offset, std::size_t count, ncclRedOp_t operation,
            void* to) {
  auto* result = static_cast<T*>(to);
  for (std::size_t i = 0; i < count; ++i) {
    T value = reinterpret_cast<const T*>(peers.slot(0) + offset)[i];
    for (int rank = 1; rank < peers.size(); ++rank) {
      const T other = reinterpret_cast<const T*>(peers.slot(rank) + offset)[i];
      value = combined(value, other, operation);
    }
    if (operation == ncclAvg) value = static_cast<T>(value / static_cast<T>(peers.size()));
    result[i] = value;
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  std::size_t bytes = type == ncclFloat8e4m3 || type == ncclFloat8e5m2 ? 1 : 0;
  with_type(type, [&](auto value) { bytes = sizeof(value); });
  return bytes;
}
bool has_sums(ncclDataType_t type) {
  bool found = false;
  with_type(type, [&](auto) { found = true; });
  return found;
}

CollectiveTransfer::CollectiveTransfer(Peers& peers, const CollectiveCall& call)
    : peers_(peers),
      call_(call),
      parts_(call.kind == Kind::reduce_scatter || call.kind == Kind::all_to_all),
      piece_(kSlotBytes / bytes_of(call.type) /
             static_cast<std::size_t>(parts_ ? peers.size() : 1)) {}

bool CollectiveTransfer::attempt() {
  while (done_ < call_.count) {
    if (!written_) {
      if (!all_have_read()) return false;
      write();
    }
    if (!all_have_written()) return false;
    read();
  }
  return true;
}

bool CollectiveTransfer::all_have_read() const {
  const std::uint64_t before = peers_.side(peers_.rank()).written;
  for (int rank = 0; rank < peers_.size(); ++rank) {
    if (peers_.side(rank).read < before) return false;
  }
  return true;
}

void CollectiveTransfer::write() {
  const std::size_t size = bytes_of(call_.type), count = std::min(piece_, call_.count - done_);
  const auto* from = static_cast<const char*>(call_.from);
  char* slot = peers_.slot(peers_.rank());
  const bool silent = call_.kind == Kind::broadcast && peers_.rank() != call_.root;
  for (int part = 0; part < (parts_ ? peers_.size() : 1) && !silent; ++part) {
    const auto at = static_cast<std::size_t>(part);
    std::memcpy(slot + at * count * size, from + (at * call_.count + done_) * size, count * size);
  }
  Side& mine = peers_.side(peers_.rank());
  mine.collective = {static_cast<int>(call_.kind), call_.type, call_.operation, call_.root,
                     call_.count};
  ++mine.written;
  written_ = true;
}

// Ranks in different collectives wait for ever, as with NCCL, but it is said.
bool CollectiveTransfer::all_have_written() {
  const Side& mine = peers_.side(peers_.rank());
  for (int rank = 0; rank < peers_.size(); ++rank) {
    const Side& other = peers_.side(rank);
    if (other.written < mine.written) return false;
    if (other.written > mine.written || other.collective == mine.collective) continue;
    if (!complained_) {
      std::fprintf(stderr,
                   "pretend GPU: rank %d is in collective %d of %zu values of type %d, rank %d in "
                   "%d of %zu of type %d\n",
                   peers_.rank(), mine.collective.kind,
                   static_cast<std::size_t>(mine.collective.count), mine.collective.type, rank,
                   other.collective.kind, static_cast<std::size_t>(other.collective.count),
                   other.collective.type);
      complained_ = true;
    }
    return false;
  }
  return true;
}

void CollectiveTransfer::read() {
  const std::size_t size = bytes_of(call_.type), count = std::min(piece_, call_.count - done_);
  auto* to = static_cast<char*>(call_.to);
  const auto mine = static_cast<std::size_t>(peers_.rank());
  const bool for_me = call_.kind != Kind::reduce || peers_.rank() == call_.root;
  const auto sum = [&](std::size_t offset) {
    with_type(call_.type, [&](auto value) {
      reduce<decltype(value)>(peers_, offset, count, call_.operation, to + done_ * size);
    });
  };
  switch (call_.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      if (for_me) sum(0);
      break;
    case Kind::reduce_scatter:
      sum(mine * count * size);
      break;
    case Kind::all_gather:
    case Kind::all_to_all: {
      const std::size_t offset = call_.kind == Kind::all_gather ? 0 : mine * count * size;
      for (int rank = 0; rank < peers_.size(); ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        std::memcpy(to + (at * call_.count + done_) * size, peers_.slot(rank) + offset,
                    count * size);
      }
      break;
    }
    case Kind::broadcast:
      std::memcpy(to + done_ * size, peers_.slot(call_.root), count * size);
      break;
  }
  ++peers_.side(peers_.rank()).read;
  done_ += count;
  written_ = false;
}

bool PairTransfer::attempt() {
  const int from = sends ? peers->rank() : peer, to = sends ? peer : peers->rank();
  Side& side = peers->pair(from, to);
  char* slot = peers->pair_slot(from, to);
  while (done < bytes) {
    const std::size_t piece = std::min(kPairBytes, bytes - done);
    char* at = static_cast<char*>(data) + done;
    if ((side.written == side.read) != sends) return false;
    if (sends) {
      std::memcpy(slot, at, piece);
      ++side.written;
    } else {
      std::memcpy(at, slot, piece);
      ++side.read;
    }
    done += piece;
  }
  return true;
}

}  // namespace pretend_gpu
