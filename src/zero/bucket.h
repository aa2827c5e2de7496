// Small flats that are neighbours travel in one collective: one of 256 KiB takes hardly longer than
// one of a few, on most networks. Transport only: cuts, sums and their bits are those of flats that
// travel by themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "zero/bucket_rule.h"
#include "zero/shards.h"

namespace poise::zero {

// Two or more flats. In a bucket's tensor each rank has a row: its shard of one flat after the
// other.
class Bucket {
 public:
  Bucket(std::vector<int> flats, const Shards& shards);

  const std::vector<int>& flats() const { return flats_; }
  std::int64_t numel() const { return ranks_ * row_; }
  // [ranks, shard] of `tensor`: where the shards of a flat lie.
  at::Tensor shards_of(int flat, const at::Tensor& tensor) const;
  at::Tensor mine(const at::Tensor& tensor) const;  // [row]

 private:
  std::vector<int> flats_;
  std::vector<std::int64_t> offsets_;  // in a row, by place in flats_, and the row's end
  std::int64_t ranks_, rank_, row_;
};

// Of a whole flat: [ranks, shard].
at::Tensor by_ranks(const at::Tensor& whole, const Shards& shards);

class Buckets {
 public:
  Buckets() = default;
  // Of flats in `order`, by the rule of bucket_rule.h.
  Buckets(const std::vector<int>& order, const Shards& shards,
          const std::function<at::ScalarType(int flat)>& type_of);

  const Bucket* of(int flat) const;  // null: it travels by itself
  std::int64_t largest() const;      // elements; 0: there are none

 private:
  std::vector<Bucket> buckets_;
  std::unordered_map<int, std::size_t> of_;  // flat -> index of its bucket
};

}  // namespace poise::zero
