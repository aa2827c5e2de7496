// Groups without peers: the world of one, and a rank of a large world that is not there.
#include <utility>

#include "comm/backend.h"
#include "comm/failure.h"
#include "comm/flat.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

class Fake final : public Backend {
 public:
  Fake(int rank, int size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}

  std::string name() const override { return name_; }

  void all_gather(const Call&, const at::Tensor& whole, const at::Tensor& mine) override {
    for (int rank = 0; rank < size_; ++rank) copy_flat(piece_of(whole, rank, size_), mine);
  }
  void reduce_scatter(const Call&, const at::Tensor& mine, const at::Tensor& whole) override {
    cast_flat(mine, piece_of(whole, rank_, size_));  // as if the others had brought zeros
  }
  void all_reduce(const Call&, const at::Tensor&) override {}
  void all_to_all(const Call&, const at::Tensor& received, const at::Tensor& sent) override {
    copy_flat(received, sent);
  }
  void broadcast(const Call&, const at::Tensor&) override {}
  void barrier(const Call&) override {}

  void abort(const std::string& message) noexcept override {
    failure_.set(join("[comm] rank ", rank_, " ended the group: ", message));
  }
  void check() const override { failure_.check(); }

 private:
  const int rank_;
  const int size_;
  const std::string name_;
  Failure failure_;
};

}  // namespace

std::unique_ptr<Backend> alone(std::string name) {
  return std::make_unique<Fake>(0, 1, std::move(name));
}

std::shared_ptr<Group> one_rank(c10::Device device) {
  return std::make_shared<Group>(alone("one rank"), 0, 1, device);
}

std::shared_ptr<Group> fake(int rank, int size, c10::Device device) {
  if (size < 1 || rank < 0 || rank >= size) {
    fail("comm", "no rank ", rank, " in a group of ", size, "; ranks go from 0 to size - 1");
  }
  return std::make_shared<Group>(std::make_unique<Fake>(rank, size, "fake"), rank, size, device);
}

}  // namespace poise::comm
