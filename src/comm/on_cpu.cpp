// Groups of processes on the CPU. Every collective first exchanges a digest of what it is about:
// gloo itself would mix up the tensors of ranks that differ, or end the process. Then data goes
// from tensor to tensor; only reductions pass through the reserved scratch. Ranks of one machine
// that may read each other's memory do so, and then meet once more: until then nobody changes or
// frees what others read.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/backend.h"
#include "comm/failure.h"
#include "comm/flat.h"
#include "comm/messages.h"
#include "comm/near.h"
#include "comm/ordered_sum.h"
#include "comm/process_group.h"
#include "comm/store_notes.h"
#include "core/fork.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

constexpr std::int64_t kTwoRounds = 16384;  // bytes from which their latency is worth it
constexpr std::int64_t kLargestElement = 8;
constexpr std::int64_t kBlock = 128 * 1024;  // bytes of a row that are summed at a time
constexpr int kFirstTag = 0x706f6973;        // out of the way of the user's own tags

at::Tensor bytes_of(const at::Tensor& flat) { return flat.variable_data().view(at::kByte); }

// FNV-1a over the description, which holds all that must be equal.
std::uint64_t digest_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  }
  return hash;
}

class OnCpu final : public Backend {
 public:
  OnCpu(const Peers& peers, Seat seat, Options options)
      : Backend(peers.numbers),
        rank_(peers.rank),
        size_(peers.size),
        options_(options),
        tag_(kFirstTag + 2 * seat.instance),
        messages_(peers.backend, options.timeout),
        records_(static_cast<std::size_t>(size_)),
        wire_(at::zeros({size_ * kRecordBytes}, at::kByte)),
        scratch_(at::empty({0}, at::kByte)),
        notes_(seat.store),
        near_(rank_, options.timeout),
        watch_(std::move(seat.watch)) {
    if (watch_) watch_->tell([this](const std::string& message) { end(message); });
  }

  std::string name() const override { return "gloo"; }

  void all_gather(const Call& call, const at::Tensor& whole, const at::Tensor& mine) override {
    run(call, mine, [&] {
      copy_flat(piece_of(whole, rank_, size_), mine);
      if (near_each_other_) {
        for (const Message& message : pieces(bytes_of(whole))) take(message, 0);
        all_have_read();
      } else {
        exchange(pieces(bytes_of(whole)), copies(bytes_of(mine)));
      }
    });
  }

  void reduce_scatter(const Call& call, const at::Tensor& mine, const at::Tensor& whole) override {
    run(call, whole, [&] {
      const auto own = piece_of(whole, rank_, size_);
      if (near_each_other_) {
        take_sum(mine, own, rank_ * static_cast<std::int64_t>(own.nbytes()));
        all_have_read();
        return;
      }
      const auto bytes = bytes_of(whole);
      const auto rows = scratch_.narrow(0, 0, bytes.numel());
      exchange(pieces(rows), pieces(bytes));
      sum_rows(mine, whole.scalar_type(), row_addresses(rows, bytes_of(own)));
    });
  }

  void all_reduce(const Call& call, const at::Tensor& values) override {
    run(call, values, [&] {
      const auto bytes = bytes_of(values);
      if (near_each_other_ && bytes.numel() >= kTwoRounds) {
        reduce_segments_directly(values);
        return;
      }
      if (reduces_in_segments(bytes.numel())) {
        reduce_segments(values);
        return;
      }
      const auto rows = scratch_.narrow(0, 0, size_ * bytes.numel());
      if (near_each_other_) {
        for (const Message& row : pieces(rows)) take(row, 0);
        all_have_read();
      } else {
        exchange(pieces(rows), copies(bytes));
      }
      sum_rows(values, values.scalar_type(), row_addresses(rows, bytes));
    });
  }

  std::int64_t all_reduce_scratch(std::int64_t bytes) const override {
    return reduces_in_segments(bytes) ? bytes + size_ * kLargestElement : size_ * bytes;
  }

  void all_to_all(const Call& call, const at::Tensor& received, const at::Tensor& sent) override {
    run(call, sent, [&] {
      const auto own = piece_of(sent, rank_, size_);
      copy_flat(piece_of(received, rank_, size_), own);
      if (near_each_other_) {
        const auto offset = rank_ * static_cast<std::int64_t>(own.nbytes());
        for (const Message& message : pieces(bytes_of(received))) take(message, offset);
        all_have_read();
      } else {
        exchange(pieces(bytes_of(received)), pieces(bytes_of(sent)));
      }
    });
  }

  // A binomial tree: in round k the ranks that have it (2^k of them, counted from the root) hand it
  // on.
  void broadcast(const Call& call, const at::Tensor& values) override {
    run(call, values, [&] {
      const auto bytes = bytes_of(values);
      if (near_each_other_) {
        if (rank_ != call.root) take({call.root, bytes}, 0);
        all_have_read();
        return;
      }
      const int place = (rank_ - call.root + size_) % size_;
      const auto rank_at = [&](int other) { return (other + call.root) % size_; };
      for (int have = 1; have < size_; have *= 2) {
        if (place < have) {
          if (place + have < size_) exchange({}, {{rank_at(place + have), bytes}});
        } else if (place < 2 * have) {
          exchange({{rank_at(place - have), bytes}}, {});
        }
      }
    });
  }

  // Nobody gets through the digests before all have come.
  void barrier(const Call& call) override {
    run(call, {}, [] {});
  }

  void reserve(std::int64_t bytes) override { scratch_ = at::empty({bytes}, at::kByte); }

  void leave_note(const std::string& key, const std::string& text) override {
    notes_.leave(key, text);
  }
  std::optional<std::string> note(const std::string& key) override { return notes_.find(key); }

  void abort(const std::string& message) noexcept override {
    if (in_child()) return;  // the group is the parent's, and what it shows the others is shared
    const std::string whole = join("[comm] ", name_of(rank_), " ended the group: ", message);
    failure_.set(whole);
    if (watch_) watch_->publish(whole);
    stop();
  }

  void check() const override { failure_.check(); }

 private:
  // `read`: what the others read of this rank, where they read.
  template <class Work>
  void run(const Call& call, const at::Tensor& read, Work work) {
    if (in_child()) {
      fail("comm", describe(call), " in the child of a fork: the group is its parent's, rank ",
           called(rank_), "; make a group in the child");
    }
    place_ = describe(call);
    if (watch_) watch_->enter(call);
    try {
      agree(read);
      if (!looked_around_) look_around();
      work();
    } catch (const Stopped&) {
      failure_.check();
      throw;
    } catch (const PeerFailure& failure) {
      give_up(explained(failure));
    }
    if (watch_) watch_->leave();
  }

  void agree(const at::Tensor& read) {
    auto& own = records_[static_cast<std::size_t>(rank_)];
    own[0] = static_cast<std::int64_t>(digest_of(place_));
    // Not the const one: a lazy clone would move when the collective writes to it.
    own[1] = read.defined() ? reinterpret_cast<std::int64_t>(read.mutable_data_ptr()) : 0;
    if (near_each_other_) {
      near_.meet(records_);
    } else {
      send_records();
    }
    if (std::any_of(records_.begin(), records_.end(), [&](auto& r) { return r[0] != own[0]; })) {
      differ();
    }
  }

  void send_records() {
    auto* bytes = wire_.mutable_data_ptr<std::uint8_t>();
    std::memcpy(bytes, records_.data(), wire_.nbytes());
    messages_.exchange(pieces(wire_), copies(piece_of(wire_, rank_, size_)), tag_);
    std::memcpy(records_.data(), bytes, wire_.nbytes());
  }

  // Once, in the first collective, with messages: whether every rank may read every other.
  void look_around() {
    looked_around_ = true;
    std::vector<NearProcess> processes(static_cast<std::size_t>(size_));
    processes[static_cast<std::size_t>(rank_)] = near_.self();
    share(processes.data(), sizeof(NearProcess));
    std::vector<std::uint8_t> finds(static_cast<std::size_t>(size_));
    finds[static_cast<std::size_t>(rank_)] = near_.find(processes) ? 1 : 0;
    share(finds.data(), 1);
    near_each_other_ = std::all_of(finds.begin(), finds.end(), [](auto one) { return one == 1; });
  }

  // Fills the `values` of the other ranks, of `bytes` each.
  void share(void* values, std::size_t bytes) {
    const auto all = at::zeros({size_ * static_cast<std::int64_t>(bytes)}, at::kByte);
    std::memcpy(all.mutable_data_ptr(), values, all.nbytes());
    exchange(pieces(all), copies(piece_of(all, rank_, size_)));
    std::memcpy(values, all.const_data_ptr(), all.nbytes());
  }

  // Reads a message of what its rank shows in this collective, from byte `offset` on.
  void take(const Message& message, std::int64_t offset) {
    read(message.peer, offset, message.bytes.mutable_data_ptr(), message.bytes.numel());
  }
  void read(int rank, std::int64_t offset, void* target, std::int64_t bytes) {
    const auto shown = records_[static_cast<std::size_t>(rank)][1];
    near_.read(rank, static_cast<std::uint64_t>(shown + offset), target, bytes);
  }

  // target = the sum over ranks of what they show from `offset` on, `own` on this one. A block at a
  // time: its rows are summed while they are in the cache.
  void take_sum(const at::Tensor& target, const at::Tensor& own, std::int64_t offset) {
    const auto item = static_cast<std::int64_t>(own.element_size());
    const auto numel = own.numel(), block = std::min(kBlock / item, numel);
    const auto* mine = static_cast<const char*>(own.const_data_ptr());
    auto* scratch = static_cast<char*>(scratch_.mutable_data_ptr());
    std::vector<const void*> rows(static_cast<std::size_t>(size_));
    for (std::int64_t begin = 0; begin < numel; begin += block) {
      const auto count = std::min(block, numel - begin);
      for (int rank = 0; rank < size_; ++rank) {
        char* row = scratch + rank * block * item;
        if (rank != rank_) read(rank, offset + begin * item, row, count * item);
        rows[static_cast<std::size_t>(rank)] = rank == rank_ ? mine + begin * item : row;
      }
      sum_rows(target.narrow(0, begin, count), own.scalar_type(), rows);
    }
  }

  // Nobody gets through before all have come: what they have read may change from here on.
  void all_have_read() { near_.meet(records_); }

  // Every rank has seen that some other differs: all send their descriptions, and name the same
  // two.
  [[noreturn]] void differ() {
    constexpr std::int64_t kLongest = 512;
    const auto texts = at::zeros({size_ * kLongest}, at::kByte);
    const auto text_of = [&](int rank) {
      return static_cast<char*>(texts.mutable_data_ptr()) + rank * kLongest;
    };
    place_.copy(text_of(rank_), kLongest - 1);
    messages_.exchange(pieces(texts), copies(piece_of(texts, rank_, size_)), tag_);
    int other = 1;
    while (other < size_ - 1 && std::strcmp(text_of(other), text_of(0)) == 0) ++other;
    give_up(differing(called(0), text_of(0), called(other), text_of(other)));
  }

  [[noreturn]] void give_up(const std::string& message) {
    failure_.set(message);
    if (watch_) watch_->publish(message);
    stop();
    failure_.check();
    throw Error(message);  // not reached
  }

  void end(const std::string& message) {
    failure_.set(message);
    stop();
  }

  bool in_child() const noexcept { return generation_ != fork_generation(); }

  void stop() noexcept {
    near_.stop();
    messages_.stop();
  }

  // The peer may have said itself why, to the store.
  std::string explained(const PeerFailure& failure) {
    if (watch_) {
      if (const auto known = watch_->failure()) return *known;
    }
    const std::string peer = name_of(failure.peer);
    if (failure.timed_out) {
      return join("[comm] rank ", called(rank_), " waited ", options_.timeout.count() / 1000.0,
                  " s in ", place_, " for ", peer,
                  watch_ ? join(", which is ", watch_->place_of(failure.peer)) : "",
                  "; find what holds it up, or raise the timeout");
    }
    return join("[comm] ", peer, " disappeared while rank ", called(rank_), " was in ", place_,
                ": ", failure.what(), "; look at its own output");
  }

  std::string name_of(int rank) const {
    return watch_ ? watch_->name_of(rank) : join("rank ", called(rank));
  }

  void exchange(const std::vector<Message>& received, const std::vector<Message>& sent) {
    messages_.exchange(received, sent, tag_ + 1);
  }

  // What is large goes in two rounds: each rank sums a segment of its own and hands it to the
  // others. That moves 2 (W-1)/W times the bytes; in one round, all to all, it is W-1 times them.
  bool reduces_in_segments(std::int64_t bytes) const { return size_ > 2 && bytes >= kTwoRounds; }

  void reduce_segments(const at::Tensor& values) {
    const auto mine = segment_of(values, rank_);
    const auto row_bytes = static_cast<std::int64_t>(mine.nbytes());
    const auto rows = scratch_.narrow(0, 0, size_ * row_bytes);
    std::vector<Message> segments;  // of the others
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      segments.push_back({peer, bytes_of(segment_of(values, peer))});
    }
    exchange(pieces(rows), segments);
    sum_rows(mine, values.scalar_type(), row_addresses(rows, bytes_of(mine)));
    exchange(segments, copies(bytes_of(mine)));
  }

  // Nobody reads this rank's own segment before it holds the sum.
  void reduce_segments_directly(const at::Tensor& values) {
    const auto offset_of = [&](const at::Tensor& segment) {
      return static_cast<const char*>(segment.const_data_ptr()) -
             static_cast<const char*>(values.const_data_ptr());
    };
    const auto mine = segment_of(values, rank_);
    take_sum(mine, mine, offset_of(mine));
    all_have_read();
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      const auto segment = segment_of(values, peer);
      take({peer, bytes_of(segment)}, offset_of(segment));
    }
    all_have_read();
  }

  at::Tensor segment_of(const at::Tensor& values, int rank) const {
    const auto begin = values.numel() * rank / size_;
    return values.narrow(0, begin, values.numel() * (rank + 1) / size_ - begin);
  }

  // Rows of `type`, which is fp64 where the values are.
  static void sum_rows(const at::Tensor& values, c10::ScalarType type,
                       const std::vector<const void*>& rows) {
    if (type == at::kDouble) {
      ordered_sum(values.mutable_data_ptr<double>(), rows, values.numel());
    } else {
      ordered_sum(values.mutable_data_ptr<float>(), type, rows, values.numel());
    }
  }

  // One message per peer, nearest first, so that not all begin with rank 0.
  std::vector<Message> pieces(const at::Tensor& bytes) const {
    std::vector<Message> all;
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      all.push_back({peer, piece_of(bytes, peer, size_)});
    }
    return all;
  }
  std::vector<Message> copies(const at::Tensor& bytes) const {
    std::vector<Message> all;
    for (int step = 1; step < size_; ++step) all.push_back({(rank_ + step) % size_, bytes});
    return all;
  }

  // The received rows, with this rank's own where it lies.
  std::vector<const void*> row_addresses(const at::Tensor& rows, const at::Tensor& mine) const {
    std::vector<const void*> addresses;
    for (int rank = 0; rank < size_; ++rank) {
      const auto row = rank == rank_ ? mine : piece_of(rows, rank, size_);
      addresses.push_back(row.const_data_ptr());
    }
    return addresses;
  }

  // What ranks tell each other of a collective: its digest, and the address of what others may
  // read.
  using Record = NearRanks::Record;
  static constexpr auto kRecordBytes = static_cast<std::int64_t>(sizeof(Record));

  const int rank_;
  const int size_;
  const Options options_;
  const int tag_;
  const int generation_ = fork_generation();
  Failure failure_;
  Messages messages_;
  std::vector<Record> records_;  // of all ranks, of the collective this rank is in
  at::Tensor wire_;              // the same as messages
  at::Tensor scratch_;
  std::string place_;  // of the collective this rank is in
  StoreNotes notes_;
  NearRanks near_;
  bool looked_around_ = false;
  bool near_each_other_ = false;  // every rank may read every other
  std::unique_ptr<Watch> watch_;  // ends first: its thread calls end()
};

}  // namespace

std::unique_ptr<Backend> on_cpu(const Peers& peers, Seat seat, Options options) {
  return std::make_unique<OnCpu>(peers, std::move(seat), std::move(options));
}

}  // namespace poise::comm
