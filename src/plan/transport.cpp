// Orders of collectives, packed by the rule of zero.
#include "plan/transport.h"

#include <algorithm>
#include <numeric>

#include "zero/bucket_rule.h"

namespace poise::plan {
namespace {

// Units forwards, then the rest.
std::vector<int> forwards(const std::vector<Flat>& flats, int rest) {
  std::vector<int> order(flats.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_partition(order.begin(), order.end(), [&](int flat) { return flat != rest; });
  return order;
}

std::int64_t whole_of(const std::vector<Flat>& flats, int flat, int ranks) {
  return whole(flats[static_cast<std::size_t>(flat)].elements, ranks);
}

}  // namespace

Route::Route(const std::vector<Flat>& flats, const std::vector<int>& order, int ranks, bool packs)
    : of_(flats.size(), -1) {
  std::vector<zero::Load> loads;
  for (const int flat : order) {
    const auto numel = whole_of(flats, flat, ranks);
    if (numel == 0) continue;
    order_.push_back(flat);
    loads.push_back({numel});
  }
  if (!packs || ranks == 1) return;
  for (const auto& places : zero::shared_collectives(loads)) {
    Bucket bucket;
    for (const int place : places) {
      const auto at = static_cast<std::size_t>(place);
      of_[static_cast<std::size_t>(order_[at])] = static_cast<int>(buckets_.size());
      bucket.numel += loads[at].numel;
    }
    bucket.first = order_[static_cast<std::size_t>(places.front())];
    bucket.last = order_[static_cast<std::size_t>(places.back())];
    buckets_.push_back(bucket);
  }
}

const Route::Bucket* Route::bucket_of(int flat) const {
  const int bucket = of_[static_cast<std::size_t>(flat)];
  return bucket < 0 ? nullptr : &buckets_[static_cast<std::size_t>(bucket)];
}

std::int64_t Route::largest() const {
  std::int64_t numel = 0;
  for (const auto& bucket : buckets_) numel = std::max(numel, bucket.numel);
  return numel;
}

std::int64_t Route::calls() const {
  const auto alone = std::count(of_.begin(), of_.end(), -1) -
                     static_cast<std::ptrdiff_t>(of_.size() - order_.size());
  return static_cast<std::int64_t>(buckets_.size()) + alone;
}

Route joins(const std::vector<Flat>& flats, int rest, const Choice& choice) {
  auto order = forwards(flats, rest);
  const auto units = std::find(order.begin(), order.end(), rest);
  std::reverse(order.begin(), units);
  return {flats, order, shard_ranks(choice), !split_of(choice).parameters};
}

Route spreads(const std::vector<Flat>& flats, int rest, const Choice& choice) {
  if (split_of(choice).parameters) return {flats, {}, shard_ranks(choice), false};
  return {flats, forwards(flats, rest), shard_ranks(choice), true};
}

}  // namespace poise::plan
