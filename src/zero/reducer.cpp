// Piles, their order, and the sums in flight.
#include "zero/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "core/launch.h"
#include "kernels/accumulate.h"
#include "poise/error.h"

namespace poise::zero {

using memory::Account;
using memory::AccountScope;

namespace {

void zero(const at::Tensor& sum, std::int64_t begin, std::int64_t end) {
  if (begin == end) return;
  if (sum.device().is_cpu()) {  // thousands of small gaps: no tensor for each
    const auto size = sum.element_size();
    std::memset(static_cast<char*>(sum.mutable_data_ptr()) + begin * size, 0,
                static_cast<std::size_t>((end - begin) * size));
  } else {
    sum.narrow(0, begin, end - begin).zero_();
  }
}

// What did not come counts as zero, and so does the padding.
void zero_gaps(const ParamTable& table, const ParamTable::Flat& layout, Pile& pile) {
  std::int64_t filled = 0;
  for (std::size_t i = 0; i < layout.entries.size(); ++i) {
    const auto& entry = table.entries()[static_cast<std::size_t>(layout.entries[i])];
    if (pile.arrived[i] == 0) continue;
    zero(pile.sum, filled, entry.offset);
    filled = entry.offset + entry.numel;
  }
  zero(pile.sum, filled, pile.sum.numel());
}

}  // namespace

Reducer::Reducer(const ParamTable& table, FlatStore& store, const Shards& shards,
                 comm::Group& group, const config::ZeroPolicy& policy, Following& following,
                 const memory::Ledger& ledger)
    : table_(table),
      store_(store),
      shards_(shards),
      group_(group),
      overlap_(policy.overlap),
      half_wire_(policy.gradient_dtype == config::DType::bf16),
      following_(following),
      ledger_(ledger),
      place_(table.entries().size()),
      flats_(table.flats().size()) {
  std::int64_t largest = 0;
  for (int flat = static_cast<int>(flats_.size()) - 1; flat >= 0; --flat) {
    const auto& entries = layout(flat).entries;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      place_[static_cast<std::size_t>(entries[i])] = static_cast<int>(i);
    }
    if (!layout(flat).trainable) continue;
    order_.push_back(flat);
    auto& made = state(flat);
    const auto& accumulator = store.accumulators().span(flat);
    made.window = {accumulator->tensor(), std::vector<char>(entries.size())};
    made.came.resize(entries.size());
    largest = std::max(largest, shards.whole(flat) * std::int64_t{sizeof(float)});
  }
  std::stable_partition(order_.begin(), order_.end(),
                        [&](int flat) { return !waits_for_end(flat); });
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (shards.whole(order_[i]) > 0) last_ = i;
  }
  if (!shards.splits_parameters()) {
    buckets_ = Buckets(order_, shards, [](int) { return at::kFloat; });
  }
  if (group_.size() > 1) {
    AccountScope scope(ledger, Account::communication);
    group_.reserve(std::max(largest, buckets_.largest() * std::int64_t{sizeof(float)}));
  }
}

bool Reducer::waits_for_end(int flat) const { return layout(flat).unit == table_.rest_unit(); }

void Reducer::start_window() {
  flights_.clear();
  packed_ = at::Tensor();
  window_joined_ = group_.size() == 1;
  micro_batch_ = 0;
  joins_ = false;
  for (const int flat : order_) {
    auto& s = state(flat);
    std::fill(s.window.arrived.begin(), s.window.arrived.end(), 0);
    s.transient = {};
    s.submitted = false;
    s.shard_written = false;
  }
}

void Reducer::begin_micro_batch(bool joins) {
  joins_ = joins && group_.size() > 1;
  next_ = 0;
  ++micro_batch_;
  for (const int flat : order_) {
    auto& s = state(flat);
    std::fill(s.came.begin(), s.came.end(), 0);
    s.missing = static_cast<int>(s.came.size());
    s.submitted = false;
  }
}

Pile& Reducer::pile_of(int flat) {
  auto& s = state(flat);
  if (!shards_.reduces_every_micro_batch() && !s.submitted) {
    auto& accumulators = store_.accumulators();
    if (accumulators.away()) s.window.sum = accumulators.get(flat, Accumulators::Use::write);
    return s.window;
  }
  if (!s.transient.sum.defined()) {
    AccountScope scope(ledger_, Account::communication);
    s.transient.sum =
        at::empty({shards_.whole(flat)}, store_.flat(flat).values.options().dtype(at::kFloat));
    s.transient.arrived.assign(s.came.size(), 0);
  }
  return s.transient;
}

void Reducer::added(int entry) {
  const int flat = table_.entries()[static_cast<std::size_t>(entry)].flat;
  auto& came = state(flat).came[static_cast<std::size_t>(place_[static_cast<std::size_t>(entry)])];
  if (came == 0) --state(flat).missing;
  came = 1;
  // Where units say when their backward ends, they are joined then.
  if (joins_ && overlap_ && !shards_.splits_parameters() && state(flat).missing == 0) {
    submit_ready();
  }
  if (group_.size() == 1 && state(flat).missing == 0) hand_back(flat);
}

// On one rank: sums that lie elsewhere go there once their micro-batch is in them, and those of the
// unit whose backward most likely is next come.
void Reducer::hand_back(int flat) {
  auto& accumulators = store_.accumulators();
  if (!accumulators.away()) return;
  accumulators.put_back(flat);
  const auto next = std::find(order_.begin(), order_.end(), flat) + 1;
  if (next != order_.end()) accumulators.expect(*next);
}

bool Reducer::ready(int flat) { return state(flat).missing == 0 && !waits_for_end(flat); }

void Reducer::submit_ready() {
  for (; next_ < last_ && ready(order_[next_]); ++next_) {
    const int flat = order_[next_];
    submit(flat, pile_of(flat), shards_.reduces_every_micro_batch());
  }
}

at::Tensor Reducer::on_wire(const at::Tensor& sum) {
  if (!half_wire_) return sum;
  AccountScope scope(ledger_, Account::communication);
  return sum.to(at::kBFloat16);
}

void Reducer::submit(int flat, Pile& pile, bool transient) {
  at::NoGradGuard no_grad;
  auto& s = state(flat);
  if (const auto* bucket = buckets_.of(flat); bucket && !s.submitted) {
    return pack(*bucket, flat, pile, transient);
  }
  // At most two transient piles of this rank exist, and two 16-bit copies.
  if (transient || half_wire_) land_all();
  zero_gaps(table_, layout(flat), pile);
  const auto range = shards_.mine(flat);
  const auto& unit = table_.units()[static_cast<std::size_t>(layout(flat).unit)];
  auto mine = pile.sum.narrow(0, range.begin, range.size());
  bool adds = transient;
  if (transient && shards_.splits_gradients() && !s.shard_written) {  // the first of its window
    const auto shard = store_.accumulators().span(flat)->tensor();
    if (shard.defined() && shard.device() == mine.device()) {
      mine = shard;
      adds = false;
      s.shard_written = true;
    }
  }
  Flight flight{flat, pile.sum, on_wire(pile.sum), adds, {}};
  following_.take(Following::Operation::join, flat);
  if (shards_.whole(flat) > 0) {
    flight.event = group_.reduce_scatter(mine, flight.wire, name_of(unit));
  }
  s.submitted = true;
  if (transient) s.transient = {};
  if (adds) store_.accumulators().expect(flat);
  flights_.push_back(std::move(flight));
}

std::string Reducer::name_of(const std::string& units) const {
  // Ranks that join once per window may have had different numbers of micro-batches.
  return shards_.reduces_every_micro_batch()
             ? join("gradients of ", units, ", micro-batch ", micro_batch_)
             : join("gradients of ", units);
}

// The bucket travels with its last flat.
void Reducer::pack(const Bucket& bucket, int flat, Pile& pile, bool transient) {
  auto& s = state(flat);
  const auto& flats = bucket.flats();
  zero_gaps(table_, layout(flat), pile);
  if (flat == flats.front()) {
    const auto travels = [](const Flight& flight) { return flight.bucket != nullptr; };
    // One may travel while the next is filled.
    while (std::count_if(flights_.begin(), flights_.end(), travels) > 1) land_first();
    AccountScope scope(ledger_, Account::communication);
    packed_ = at::empty({bucket.numel()}, pile.sum.options());
  }
  bucket.shards_of(flat, packed_).copy_(by_ranks(pile.sum, shards_));
  const bool full = flat == flats.back();
  const auto wire = full ? on_wire(packed_) : at::Tensor();
  following_.take(Following::Operation::join, flat);
  s.submitted = true;
  if (transient) s.transient = {};
  if (!full) return;
  const auto unit = [&](int one) {
    return table_.units()[static_cast<std::size_t>(layout(one).unit)];
  };
  Flight flight{flat, std::exchange(packed_, {}), wire, transient, {}, &bucket};
  flight.event = group_.reduce_scatter(bucket.mine(flight.sum), wire,
                                       name_of(join(unit(flats.front()), " to ", unit(flat))));
  flights_.push_back(std::move(flight));
}

void Reducer::land_first() {
  const auto flight = std::move(flights_.front());
  flights_.pop_front();
  land(flight);
}

void Reducer::land_all() {
  while (!flights_.empty()) land_first();
}

void Reducer::land(const Flight& flight) {
  at::NoGradGuard no_grad;
  following_.wait(flight.event);
  if (flight.bucket != nullptr) {
    for (const int flat : flight.bucket->flats()) {
      const auto shards = flight.bucket->shards_of(flat, flight.sum);
      put_into_shard(flat, shards.select(0, shards_.rank()), flight.adds);
    }
  } else if (flight.adds) {  // else it was summed in place
    const auto range = shards_.mine(flight.flat);
    put_into_shard(flight.flat, flight.sum.narrow(0, range.begin, range.size()), true);
  }
}

void Reducer::put_into_shard(int flat, const at::Tensor& sum, bool transient) {
  auto& s = state(flat);
  auto shard = store_.gradient_shard(flat, Accumulators::Use::write);
  const bool add = transient && (!shards_.splits_gradients() || s.shard_written);
  const auto there = sum.to(shard.device());
  kernels::accumulate(launch_for(shard.device()),
                      add ? kernels::Accumulate::add : kernels::Accumulate::write,
                      shard.mutable_data_ptr<float>(), kernels::DType::f32, there.const_data_ptr(),
                      there.numel(), 1.0f, nullptr);
  store_.accumulators().put_back(flat);
  s.shard_written = true;
}

void Reducer::join_unit(int unit) {
  if (!joins_ || !overlap_) return;
  for (const int flat : order_) {
    if (layout(flat).unit == unit) join_flat(flat);
  }
}

void Reducer::join_flat(int flat) {
  submit(flat, pile_of(flat), shards_.reduces_every_micro_batch() || state(flat).submitted);
}

void Reducer::end_following() {
  land_all();
  joins_ = false;
  window_joined_ = true;
}

void Reducer::drop_unjoined() {
  for (const int flat : order_) state(flat).transient = {};
}

namespace {

constexpr const char* kLate = "late";

}  // namespace

// Of this window and, where each is joined, micro-batch.
std::string Reducer::late_note(const std::string& flats) const {
  const auto number = shards_.reduces_every_micro_batch() ? micro_batch_ : 0;
  return following_.stamped(join(number, ":", flats));
}

void Reducer::follow_late() {
  if (group_.size() == 1) return;
  std::string flats;
  try {
    const auto text = group_.note(kLate);
    const auto stamp = late_note("");
    if (!text || text->rfind(stamp, 0) != 0) return;
    flats = text->substr(stamp.size());
  } catch (const Error&) {  // a group that has no store for notes
    return;
  }
  std::istringstream stream(flats);
  for (int flat = 0; stream >> flat;) submit(flat, pile_of(flat), true);
  land_all();
}

void Reducer::end_micro_batch() {
  if (!joins_) return;
  std::string late;
  for (const int flat : order_) {
    if (state(flat).submitted && state(flat).transient.sum.defined()) late += join(" ", flat);
  }
  if (!late.empty()) group_.leave_note(kLate, late_note(late));
  for (const int flat : order_) {
    if (!state(flat).submitted) join_flat(flat);
  }
  for (const int flat : order_) {  // gradients that came after their flat went
    auto& s = state(flat);
    if (s.transient.sum.defined()) submit(flat, s.transient, true);
  }
  end_following();
}

void Reducer::zero_what_never_came() {
  if (group_.size() > 1) return;
  at::NoGradGuard no_grad;
  for (const int flat : order_) {
    const auto& arrived = state(flat).window.arrived;
    if (std::count(arrived.begin(), arrived.end(), 0) == 0) continue;
    auto& pile = pile_of(flat);
    zero_gaps(table_, layout(flat), pile);
    std::fill(pile.arrived.begin(), pile.arrived.end(), 1);
  }
}

}  // namespace poise::zero
