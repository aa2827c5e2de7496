// The order in which flats travel between ranks, and which of them share a collective.
#pragma once

#include "plan/states.h"

namespace poise::plan {

class Route {
 public:
  // Through `order`; `packs`: neighbours may share a collective.
  Route(const std::vector<Flat>& flats, const std::vector<int>& order, int ranks, bool packs);

  struct Bucket {
    int first = -1, last = -1;  // flats
    std::int64_t numel = 0;
  };

  const std::vector<int>& order() const { return order_; }  // of flats that train anything
  const Bucket* bucket_of(int flat) const;                  // null: it travels by itself
  std::int64_t largest() const;  // elements of a bucket; 0: there are none
  std::int64_t calls() const;    // collectives

 private:
  std::vector<int> order_;
  std::vector<Bucket> buckets_;
  std::vector<int> of_;  // by flat: its bucket; -1: none
};

// Gradients: units backwards, the rest (-1: there is none) at the end.
Route joins(const std::vector<Flat>& flats, int rest, const Choice& choice);
// What is whole on every rank, after an update of its shards, or of sums at stage 0.
Route spreads(const std::vector<Flat>& flats, int rest, const Choice& choice);

}  // namespace poise::plan
