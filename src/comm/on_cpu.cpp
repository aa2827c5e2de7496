// Groups of processes on the CPU. Every collective first exchanges a digest of what it is about:
// gloo itself would mix up the tensors of ranks that differ, or end the process. Then a carrier
// moves the data.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/backend.h"
#include "comm/carrier.h"
#include "comm/failure.h"
#include "comm/flat.h"
#include "comm/process_group.h"
#include "comm/store_notes.h"
#include "core/fork.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

constexpr std::int64_t kLargestElement = 8;

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
    run(call, mine, [&](Carrier& carrier) {
      copy_flat(piece_of(whole, rank_, size_), mine);
      carrier.all_gather(whole, mine);
    });
  }

  void reduce_scatter(const Call& call, const at::Tensor& mine, const at::Tensor& whole) override {
    run(call, whole, [&](Carrier& carrier) { carrier.reduce_scatter(mine, whole); });
  }

  void all_reduce(const Call& call, const at::Tensor& values) override {
    run(call, values, [&](Carrier& carrier) { carrier.all_reduce(values); });
  }

  std::int64_t all_reduce_scratch(std::int64_t bytes) const override {
    return reduces_in_segments(bytes, size_) ? bytes + size_ * kLargestElement : size_ * bytes;
  }

  void all_to_all(const Call& call, const at::Tensor& received, const at::Tensor& sent) override {
    run(call, sent, [&](Carrier& carrier) {
      copy_flat(piece_of(received, rank_, size_), piece_of(sent, rank_, size_));
      carrier.all_to_all(received, sent);
    });
  }

  void broadcast(const Call& call, const at::Tensor& values) override {
    run(call, values, [&](Carrier& carrier) { carrier.broadcast(values, call.root); });
  }

  // Nobody gets through the digests before all have come.
  void barrier(const Call& call) override {
    run(call, {}, [](Carrier&) {});
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
      if (!carrier_) look_around();
      work(*carrier_);
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
    std::vector<NearProcess> processes(static_cast<std::size_t>(size_));
    processes[static_cast<std::size_t>(rank_)] = near_.self();
    share(processes.data(), sizeof(NearProcess));
    std::vector<std::uint8_t> finds(static_cast<std::size_t>(size_));
    finds[static_cast<std::size_t>(rank_)] = near_.find(processes) ? 1 : 0;
    share(finds.data(), 1);
    near_each_other_ = std::all_of(finds.begin(), finds.end(), [](auto one) { return one == 1; });
    const Seated seated{rank_, size_, scratch_};
    carrier_ = near_each_other_ ? by_reading(seated, near_, records_)
                                : by_messages(seated, messages_, tag_ + 1);
  }

  // Fills the `values` of the other ranks, of `bytes` each.
  void share(void* values, std::size_t bytes) {
    const auto all = at::zeros({size_ * static_cast<std::int64_t>(bytes)}, at::kByte);
    std::memcpy(all.mutable_data_ptr(), values, all.nbytes());
    messages_.exchange(pieces(all), copies(piece_of(all, rank_, size_)), tag_ + 1);
    std::memcpy(values, all.const_data_ptr(), all.nbytes());
  }

  // Every rank has seen that some other differs: all send their descriptions, and name the same
  // two.
  [[noreturn]] void differ() {
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(size_));
    lengths[static_cast<std::size_t>(rank_)] = static_cast<std::int64_t>(place_.size());
    share(lengths.data(), sizeof(std::int64_t));
    const auto longest =
        static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
    std::string texts(static_cast<std::size_t>(size_) * longest, '\0');
    const auto at = [&](int rank) { return static_cast<std::size_t>(rank) * longest; };
    texts.replace(at(rank_), place_.size(), place_);
    share(texts.data(), longest);
    const auto text_of = [&](int rank) {
      return texts.substr(at(rank),
                          static_cast<std::size_t>(lengths[static_cast<std::size_t>(rank)]));
    };
    int other = 1;
    while (other < size_ - 1 && text_of(other) == text_of(0)) ++other;
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

  std::vector<Message> pieces(const at::Tensor& bytes) const {
    return pieces_of(bytes, rank_, size_);
  }
  std::vector<Message> copies(const at::Tensor& bytes) const {
    return copies_of(bytes, rank_, size_);
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
  bool near_each_other_ = false;      // every rank may read every other
  std::unique_ptr<Carrier> carrier_;  // null before the first collective
  std::unique_ptr<Watch> watch_;      // ends first: its thread calls end()
};

}  // namespace

std::unique_ptr<Backend> on_cpu(const Peers& peers, Seat seat, Options options) {
  return std::make_unique<OnCpu>(peers, std::move(seat), std::move(options));
}

}  // namespace poise::comm
