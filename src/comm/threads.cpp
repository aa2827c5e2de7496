// Ranks that are threads of one process: they read each other's tensors where they lie. Every rank
// writes only memory that no other rank reads in the same visit; the comments say which.
#include <ATen/core/Tensor.h>

#include <cstring>
#include <utility>

#include "comm/flat.h"
#include "comm/meeting.h"
#include "comm/ordered_sum.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

const void* at_byte(const void* base, std::int64_t bytes) {
  return static_cast<const char*>(base) + bytes;
}

void copy_from(const at::Tensor& target, const void* source) {
  if (target.nbytes() == 0 || target.const_data_ptr() == source) return;
  std::memcpy(target.mutable_data_ptr(), source, target.nbytes());
}

class Threads final : public Backend {
 public:
  Threads(std::shared_ptr<Meeting> meeting, int rank)
      : Backend(meeting->numbers()),
        meeting_(std::move(meeting)),
        rank_(rank),
        size_(meeting_->size()) {}
  ~Threads() override { meeting_->depart(rank_); }

  std::string name() const override { return "threads"; }

  // Read by others: `mine`. Written: the other pieces of `whole`, and this rank's before the visit.
  void all_gather(const Call& call, const at::Tensor& whole, const at::Tensor& mine) override {
    copy_flat(piece_of(whole, rank_, size_), mine);
    Meeting::Visit visit(*meeting_, rank_, call, mine.const_data_ptr());
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) copy_from(piece_of(whole, rank, size_), visit.brought_by(rank));
    }
    visit.leave();
  }

  // Read by others: their pieces of `whole`. Written: `mine`, which at most is this rank's own.
  void reduce_scatter(const Call& call, const at::Tensor& mine, const at::Tensor& whole) override {
    Meeting::Visit visit(*meeting_, rank_, call, whole.const_data_ptr());
    const std::int64_t piece_bytes = static_cast<std::int64_t>(whole.nbytes()) / size_;
    sum_rows(mine, whole.scalar_type(), rows(visit, rank_ * piece_bytes));
    visit.leave();
  }

  // First every rank sums its own segment, which only it reads; then all copy the sums.
  void all_reduce(const Call& call, const at::Tensor& values) override {
    {
      Meeting::Visit visit(*meeting_, rank_, call, values.const_data_ptr());
      sum_rows(segment_of(values, rank_, size_), values.scalar_type(),
               rows(visit, segment_begin(values, rank_)));
      visit.leave();
    }
    Meeting::Visit visit(*meeting_, rank_, call, values.const_data_ptr());
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      copy_from(segment_of(values, rank, size_),
                at_byte(visit.brought_by(rank), segment_begin(values, rank)));
    }
    visit.leave();
  }

  // Read by others: `sent`. Written: `received`.
  void all_to_all(const Call& call, const at::Tensor& received, const at::Tensor& sent) override {
    Meeting::Visit visit(*meeting_, rank_, call, sent.const_data_ptr());
    const std::int64_t piece_bytes = static_cast<std::int64_t>(sent.nbytes()) / size_;
    for (int rank = 0; rank < size_; ++rank) {
      copy_from(piece_of(received, rank, size_),
                at_byte(visit.brought_by(rank), rank_ * piece_bytes));
    }
    visit.leave();
  }

  // Read by others: the root's values. Written: everybody else's.
  void broadcast(const Call& call, const at::Tensor& values) override {
    Meeting::Visit visit(*meeting_, rank_, call, values.const_data_ptr());
    copy_from(values, visit.brought_by(call.root));
    visit.leave();
  }

  void barrier(const Call& call) override {
    Meeting::Visit(*meeting_, rank_, call, nullptr).leave();
  }

  void leave_note(const std::string& key, const std::string& text) override {
    meeting_->notes().leave(key, text);
  }
  std::optional<std::string> note(const std::string& key) override {
    return meeting_->notes().find(key);
  }

  void abort(const std::string& message) noexcept override {
    meeting_->fail(join("[comm] rank ", called(rank_), " ended the group: ", message));
  }

  void check() const override { meeting_->check(); }

 private:
  std::vector<const void*> rows(const Meeting::Visit& visit, std::int64_t offset) const {
    std::vector<const void*> found;
    for (int rank = 0; rank < size_; ++rank) {
      found.push_back(at_byte(visit.brought_by(rank), offset));
    }
    return found;
  }

  // In bytes.
  std::int64_t segment_begin(const at::Tensor& values, int rank) const {
    const auto segment = segment_of(values, rank, size_);
    return (segment.storage_offset() - values.storage_offset()) * values.element_size();
  }

  std::shared_ptr<Meeting> meeting_;
  const int rank_;
  const int size_;
};

}  // namespace

std::vector<std::shared_ptr<Group>> threads(int size, Options options) {
  if (size < 1) fail("comm", "a group of ", size, " ranks; ask for 1 or more");
  if (size == 1) return {std::make_shared<Group>(alone("threads"), 0, 1, c10::Device(c10::kCPU))};
  const auto meeting =
      std::make_shared<Meeting>(size, options.timeout, Numbers(options.names, size));
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.push_back(std::make_shared<Group>(std::make_unique<Threads>(meeting, rank), rank, size,
                                             c10::Device(c10::kCPU)));
  }
  return groups;
}

}  // namespace poise::comm
