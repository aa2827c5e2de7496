// One copy, by the reader. Then all meet once more: until then nobody changes or frees what others
// read.
#include <algorithm>
#include <utility>

#include "comm/carrier.h"
#include "comm/flat.h"
#include "comm/ordered_sum.h"

namespace poise::comm {
namespace {

constexpr std::int64_t kBlock = 128 * 1024;  // bytes of a row that are summed at a time

class ByReading final : public Carrier {
 public:
  ByReading(const Seated& seated, NearRanks& near, std::vector<NearRanks::Record>& records)
      : seated_(seated), near_(near), records_(records) {}

  void all_gather(const at::Tensor& whole, const at::Tensor&) override {
    for (const Message& piece : pieces(bytes_of(whole))) take(piece, 0);
    all_have_read();
  }

  void reduce_scatter(const at::Tensor& mine, const at::Tensor& whole) override {
    const auto own = piece_of(whole, seated_.rank, seated_.size);
    take_sum(mine, own, seated_.rank * static_cast<std::int64_t>(own.nbytes()));
    all_have_read();
  }

  void all_reduce(const at::Tensor& values) override {
    const auto bytes = bytes_of(values);
    if (bytes.numel() >= kTwoRounds) return reduce_segments(values);
    const auto rows = seated_.scratch.narrow(0, 0, seated_.size * bytes.numel());
    const auto own = piece_of(rows, seated_.rank, seated_.size);
    copy_flat(own, bytes);
    for (const Message& row : pieces(rows)) take(row, 0);
    all_have_read();
    std::vector<const void*> addresses;
    for (int rank = 0; rank < seated_.size; ++rank) {
      addresses.push_back(piece_of(rows, rank, seated_.size).const_data_ptr());
    }
    sum_rows(values, values.scalar_type(), addresses);
  }

  void all_to_all(const at::Tensor& received, const at::Tensor& sent) override {
    const auto offset = seated_.rank * (static_cast<std::int64_t>(sent.nbytes()) / seated_.size);
    for (const Message& piece : pieces(bytes_of(received))) take(piece, offset);
    all_have_read();
  }

  void broadcast(const at::Tensor& values, int root) override {
    if (seated_.rank != root) take({root, bytes_of(values)}, 0);
    all_have_read();
  }

 private:
  // Nobody reads this rank's own segment before it holds the sum.
  void reduce_segments(const at::Tensor& values) {
    const auto segment = [&](int rank) { return segment_of(values, rank, seated_.size); };
    const auto offset_of = [&](const at::Tensor& part) {
      return static_cast<const char*>(part.const_data_ptr()) -
             static_cast<const char*>(values.const_data_ptr());
    };
    const auto mine = segment(seated_.rank);
    take_sum(mine, mine, offset_of(mine));
    all_have_read();
    for (int step = 1; step < seated_.size; ++step) {
      const int peer = (seated_.rank + step) % seated_.size;
      take({peer, bytes_of(segment(peer))}, offset_of(segment(peer)));
    }
    all_have_read();
  }

  // target = the sum over ranks of what they show from `offset` on, `own` on this one. A block at a
  // time: its rows are summed while they are in the cache.
  void take_sum(const at::Tensor& target, const at::Tensor& own, std::int64_t offset) {
    const auto item = static_cast<std::int64_t>(own.element_size());
    const auto numel = own.numel(), block = std::min(kBlock / item, numel);
    const auto* mine = static_cast<const char*>(own.const_data_ptr());
    auto* scratch = static_cast<char*>(seated_.scratch.mutable_data_ptr());
    std::vector<const void*> rows(static_cast<std::size_t>(seated_.size));
    for (std::int64_t begin = 0; begin < numel; begin += block) {
      const auto count = std::min(block, numel - begin);
      for (int rank = 0; rank < seated_.size; ++rank) {
        char* row = scratch + rank * block * item;
        const bool is_own = rank == seated_.rank;
        if (!is_own) read(rank, offset + begin * item, row, count * item);
        rows[static_cast<std::size_t>(rank)] = is_own ? mine + begin * item : row;
      }
      sum_rows(target.narrow(0, begin, count), own.scalar_type(), rows);
    }
  }

  // Reads a message of what its rank shows in this collective, from byte `offset` on.
  void take(const Message& message, std::int64_t offset) {
    read(message.peer, offset, message.bytes.mutable_data_ptr(), message.bytes.numel());
  }
  void read(int rank, std::int64_t offset, void* target, std::int64_t bytes) {
    const auto shown = records_[static_cast<std::size_t>(rank)][1];
    near_.read(rank, static_cast<std::uint64_t>(shown + offset), target, bytes);
  }

  // Nobody gets through before all have come: what they have read may change from here on.
  void all_have_read() { near_.meet(records_); }

  std::vector<Message> pieces(const at::Tensor& bytes) const {
    return pieces_of(bytes, seated_.rank, seated_.size);
  }

  const Seated seated_;
  NearRanks& near_;
  std::vector<NearRanks::Record>& records_;
};

}  // namespace

std::unique_ptr<Carrier> by_reading(const Seated& seated, NearRanks& near,
                                    std::vector<NearRanks::Record>& records) {
  return std::make_unique<ByReading>(seated, near, records);
}

}  // namespace poise::comm
