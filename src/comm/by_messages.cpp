// Data goes from tensor to tensor; only what is to be summed passes through the scratch.
#include <utility>

#include "comm/carrier.h"
#include "comm/flat.h"
#include "comm/ordered_sum.h"

namespace poise::comm {
namespace {

class ByMessages final : public Carrier {
 public:
  ByMessages(const Seated& seated, Messages& messages, int tag)
      : seated_(seated), messages_(messages), tag_(tag) {}

  void all_gather(const at::Tensor& whole, const at::Tensor& mine) override {
    exchange(pieces(bytes_of(whole)), copies(bytes_of(mine)));
  }

  void reduce_scatter(const at::Tensor& mine, const at::Tensor& whole) override {
    const auto bytes = bytes_of(whole);
    const auto rows = seated_.scratch.narrow(0, 0, bytes.numel());
    exchange(pieces(rows), pieces(bytes));
    const auto own = piece_of(bytes, seated_.rank, seated_.size);
    sum_rows(mine, whole.scalar_type(), row_addresses(rows, own));
  }

  void all_reduce(const at::Tensor& values) override {
    const auto bytes = bytes_of(values);
    if (reduces_in_segments(bytes.numel(), seated_.size)) return reduce_segments(values);
    const auto rows = seated_.scratch.narrow(0, 0, seated_.size * bytes.numel());
    exchange(pieces(rows), copies(bytes));
    sum_rows(values, values.scalar_type(), row_addresses(rows, bytes));
  }

  void all_to_all(const at::Tensor& received, const at::Tensor& sent) override {
    exchange(pieces(bytes_of(received)), pieces(bytes_of(sent)));
  }

  // A binomial tree: in round k the ranks that have it (2^k of them, counted from the root) hand it
  // on.
  void broadcast(const at::Tensor& values, int root) override {
    const auto bytes = bytes_of(values);
    const int size = seated_.size, place = (seated_.rank - root + size) % size;
    const auto rank_at = [&](int other) { return (other + root) % size; };
    for (int have = 1; have < size; have *= 2) {
      if (place < have) {
        if (place + have < size) exchange({}, {{rank_at(place + have), bytes}});
      } else if (place < 2 * have) {
        exchange({{rank_at(place - have), bytes}}, {});
      }
    }
  }

 private:
  void reduce_segments(const at::Tensor& values) {
    const auto mine = segment(values, seated_.rank);
    const auto row_bytes = static_cast<std::int64_t>(mine.nbytes());
    const auto rows = seated_.scratch.narrow(0, 0, seated_.size * row_bytes);
    std::vector<Message> segments;  // of the others
    for (int step = 1; step < seated_.size; ++step) {
      const int peer = (seated_.rank + step) % seated_.size;
      segments.push_back({peer, bytes_of(segment(values, peer))});
    }
    exchange(pieces(rows), segments);
    sum_rows(mine, values.scalar_type(), row_addresses(rows, bytes_of(mine)));
    exchange(segments, copies(bytes_of(mine)));
  }

  at::Tensor segment(const at::Tensor& values, int rank) const {
    return segment_of(values, rank, seated_.size);
  }
  std::vector<Message> pieces(const at::Tensor& bytes) const {
    return pieces_of(bytes, seated_.rank, seated_.size);
  }
  std::vector<Message> copies(const at::Tensor& bytes) const {
    return copies_of(bytes, seated_.rank, seated_.size);
  }

  // The received rows, with this rank's own where it lies.
  std::vector<const void*> row_addresses(const at::Tensor& rows, const at::Tensor& own) const {
    std::vector<const void*> addresses;
    for (int rank = 0; rank < seated_.size; ++rank) {
      const auto row = rank == seated_.rank ? own : piece_of(rows, rank, seated_.size);
      addresses.push_back(row.const_data_ptr());
    }
    return addresses;
  }

  void exchange(const std::vector<Message>& received, const std::vector<Message>& sent) {
    messages_.exchange(received, sent, tag_);
  }

  const Seated seated_;
  Messages& messages_;
  const int tag_;
};

}  // namespace

std::unique_ptr<Carrier> by_messages(const Seated& seated, Messages& messages, int tag) {
  return std::make_unique<ByMessages>(seated, messages, tag);
}

}  // namespace poise::comm
