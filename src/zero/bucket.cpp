// Which flats share a bucket, and where they lie in it.
#include "zero/bucket.h"

#include <algorithm>
#include <utility>

#include "poise/error.h"

namespace poise::zero {

Bucket::Bucket(std::vector<int> flats, const Shards& shards)
    : flats_(std::move(flats)), ranks_(shards.size()), rank_(shards.rank()), row_(0) {
  for (const int flat : flats_) {
    offsets_.push_back(row_);
    row_ += shards.shard(flat);
  }
  offsets_.push_back(row_);
}

at::Tensor Bucket::shards_of(int flat, const at::Tensor& tensor) const {
  const auto found = std::find(flats_.begin(), flats_.end(), flat);
  POISE_CHECK(found != flats_.end(), flat);
  const auto place = static_cast<std::size_t>(found - flats_.begin());
  return tensor.view({ranks_, row_})
      .narrow(1, offsets_[place], offsets_[place + 1] - offsets_[place]);
}

at::Tensor Bucket::mine(const at::Tensor& tensor) const {
  return tensor.narrow(0, rank_ * row_, row_);
}

at::Tensor by_ranks(const at::Tensor& whole, const Shards& shards) {
  return whole.view({shards.size(), whole.numel() / shards.size()});
}

Buckets::Buckets(const std::vector<int>& order, const Shards& shards,
                 const std::function<at::ScalarType(int flat)>& type_of) {
  if (shards.size() == 1) return;
  std::vector<Load> loads;
  for (const int flat : order) {
    loads.push_back({shards.whole(flat), static_cast<int>(type_of(flat))});
  }
  for (const auto& places : shared_collectives(loads)) {
    std::vector<int> flats;
    for (const int place : places) flats.push_back(order[static_cast<std::size_t>(place)]);
    for (const int flat : flats) of_[flat] = buckets_.size();
    buckets_.emplace_back(std::move(flats), shards);
  }
}

const Bucket* Buckets::of(int flat) const {
  const auto found = of_.find(flat);
  return found == of_.end() ? nullptr : &buckets_[found->second];
}

std::int64_t Buckets::largest() const {
  std::int64_t numel = 0;
  for (const auto& bucket : buckets_) numel = std::max(numel, bucket.numel());
  return numel;
}

}  // namespace poise::zero
