// The steps of zero's reducer (src/zero/reducer.cpp), in bytes.
#include "plan/joining.h"

#include <algorithm>
#include <deque>

#include "plan/tape.h"
#include "plan/transport.h"

namespace poise::plan {
namespace {

// [Note: gradients on their way] Where each micro-batch is joined, a flat's gradients fill fp32
// memory of their own; else they fill the accumulators. A flat that travels by itself keeps what it
// sends (that memory, and a 16-bit copy where there is one) until the next such flat goes. One that
// shares a collective is copied into a bucket; while a bucket is filled, another may travel.
class Reduces {
 public:
  Reduces(const Chain& chain, const Choice& choice)
      : flats_(chain.flats),
        ranks_(shard_ranks(choice)),
        every_(choice.reduces_every),
        half_(choice.gradient_dtype != config::DType::fp32),
        route_(joins(chain.flats, chain.rest, choice)),
        filled_(chain.flats.size()),
        submitted_(chain.flats.size()) {}

  const std::vector<int>& order() const { return route_.order(); }

  // Its first gradient comes.
  void fill(int flat) {
    if (!every_ || filled_[at(flat)]) return;
    filled_[at(flat)] = true;
    tape_.take(bytes(flat, 4));
  }

  void submit(int flat) {
    if (submitted_[at(flat)]) return;
    submitted_[at(flat)] = true;
    fill(flat);
    if (const auto* bucket = route_.bucket_of(flat)) return pack(*bucket, flat);
    while ((every_ || half_) && !flights_.empty()) land();
    const auto wire = half_ ? bytes(flat, 2) : 0;
    tape_.take(wire);
    flights_.push_back({wire + (every_ ? bytes(flat, 4) : 0), false});
  }

  // Since it was asked last.
  std::int64_t highest() {
    const auto peak = tape_.peak();
    tape_ = Tape(tape_.now());
    return peak;
  }

 private:
  struct Flight {
    std::int64_t bytes;
    bool bucket;
  };
  static std::size_t at(int flat) { return static_cast<std::size_t>(flat); }
  std::int64_t bytes(int flat, int width) const {
    return width * whole(flats_[at(flat)].elements, ranks_);
  }

  void pack(const Route::Bucket& bucket, int flat) {
    if (flat == bucket.first) {
      const auto travels = [](const Flight& flight) { return flight.bucket; };
      while (std::count_if(flights_.begin(), flights_.end(), travels) > 1) land();
      tape_.take(4 * bucket.numel);
    }
    const auto wire = half_ && flat == bucket.last ? 2 * bucket.numel : 0;
    tape_.take(wire);
    if (every_) tape_.give(bytes(flat, 4));
    if (flat == bucket.last) flights_.push_back({4 * bucket.numel + wire, true});
  }

  void land() {
    tape_.give(flights_.front().bytes);
    flights_.pop_front();
  }

  const std::vector<Flat>& flats_;
  const int ranks_;
  const bool every_, half_;
  const Route route_;
  std::vector<bool> filled_, submitted_;  // by flat
  std::deque<Flight> flights_;
  Tape tape_;
};

// By flat: the link whose backward is its last; that of a flat without links is -1.
std::vector<int> last_links(const Chain& chain) {
  std::vector<int> links(chain.flats.size(), -1);
  for (std::size_t i = chain.links.size(); i-- > 0;) {
    if (const int flat = chain.links[i].flat; flat >= 0) {
      links[static_cast<std::size_t>(flat)] = static_cast<int>(i);
    }
  }
  return links;
}

}  // namespace

Joining joining(const Chain& chain, const Choice& choice) {
  Joining found;
  found.backward.resize(chain.links.size());
  if (shard_ranks(choice) == 1) return found;
  Reduces reduces(chain, choice);
  const auto last_link = last_links(chain);
  const auto& order = reduces.order();
  std::size_t next = 0;
  // Units in their order, but for the last flat of all, as far as their gradients have come. When
  // those of units that no link runs come is not known: they keep none waiting.
  const auto submit_until = [&](int link) {
    for (; next + 1 < order.size() && order[next] != chain.rest; ++next) {
      const int last = last_link[static_cast<std::size_t>(order[next])];
      if (last >= 0 && last < link) return;
      reduces.submit(order[next]);
    }
  };
  const auto links = static_cast<int>(chain.links.size());
  if (choice.overlap) submit_until(links);
  for (int link = links; link-- > 0;) {
    const int flat = chain.links[static_cast<std::size_t>(link)].flat;
    if (chain.rest >= 0) reduces.fill(chain.rest);
    if (flat >= 0) reduces.fill(flat);
    found.backward[static_cast<std::size_t>(link)] = reduces.highest();
    if (!choice.overlap) continue;
    submit_until(link);
    const bool unit = flat >= 0 && flat != chain.rest;
    if (split_of(choice).parameters && unit && last_link[static_cast<std::size_t>(flat)] == link) {
      reduces.submit(flat);  // when its backward ends, whatever came before it
    }
  }
  for (const int flat : order) reduces.submit(flat);
  found.end = reduces.highest();
  return found;
}

}  // namespace poise::plan
