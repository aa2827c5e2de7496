// Buckets are filled with this rank's shards and emptied of everybody's.
#include "zero/gathers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "poise/error.h"

namespace poise::zero {
namespace {

std::vector<int> whole_and_trainable(const ParamTable& table, const Shards& shards) {
  std::vector<int> flats;
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    const bool trainable = table.flats()[static_cast<std::size_t>(flat)].trainable;
    if (trainable && !shards.splits_parameters(flat)) flats.push_back(flat);
  }
  return flats;
}

}  // namespace

Gathers::Gathers(const ParamTable& table, FlatStore& store, const Shards& shards,
                 const comm::Ranks& ranks, const memory::Ledger& ledger)
    : table_(table),
      store_(store),
      shards_(shards),
      group_(*ranks.shard),
      buckets_(whole_and_trainable(table, shards), shards,
               [&](int flat) { return store.flat(flat).values.scalar_type(); }) {
  const auto bytes = buckets_.largest() * std::int64_t{sizeof(float)};
  if (bytes == 0) return;
  memory::AccountScope scope(ledger, memory::Account::communication);
  for (auto& memory : memory_) {
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(group_.device()));
  }
}

void Gathers::values(int flat) {
  if (const auto* bucket = buckets_.of(flat)) {
    pack(*bucket, flat, store_.flat(flat).values, "");
  } else {
    events_.push_back(store_.gather_values(flat));
  }
}

void Gathers::gradient(int flat) {
  const auto sums = store_.optimized_gradient(flat)->tensor();
  const auto* bucket = buckets_.of(flat);
  if (bucket != nullptr && sums.device() == group_.device()) {
    pack(*bucket, flat, sums, "gradient of ");
  } else {
    events_.push_back(store_.gather_gradient(flat));
  }
}

void Gathers::pack(const Bucket& bucket, int flat, const at::Tensor& whole, const char* what) {
  at::NoGradGuard no_grad;
  if (flat == bucket.flats().front()) {
    if (flights_.size() == memory_.size()) land();
    auto& memory = memory_[next_++ % memory_.size()];
    const auto bytes = bucket.numel() * static_cast<std::int64_t>(whole.element_size());
    open_ = {&bucket, memory.narrow(0, 0, bytes).view(whole.scalar_type()), {}, {}};
  }
  POISE_CHECK(open_.bucket == &bucket && flat == bucket.flats()[open_.wholes.size()], flat);
  open_.wholes.push_back(whole.variable_data());  // what poise writes is no edit
  const auto rank = shards_.rank();
  bucket.shards_of(flat, open_.tensor)
      .select(0, rank)
      .copy_(by_ranks(whole, shards_).select(0, rank));
  if (flat != bucket.flats().back()) return;
  const auto& flats = table_.flats();
  const auto unit = [&](int one) {
    return table_.units()[static_cast<std::size_t>(flats[static_cast<std::size_t>(one)].unit)];
  };
  open_.event = group_.all_gather(open_.tensor, bucket.mine(open_.tensor),
                                  join(what, unit(bucket.flats().front()), " to ", unit(flat)));
  flights_.push_back(std::exchange(open_, {}));
}

// The first one in flight.
void Gathers::land() {
  at::NoGradGuard no_grad;
  const auto flight = std::move(flights_.front());
  flights_.pop_front();
  flight.event.wait();
  for (std::size_t i = 0; i < flight.wholes.size(); ++i) {
    by_ranks(flight.wholes[i], shards_)
        .copy_(flight.bucket->shards_of(flight.bucket->flats()[i], flight.tensor));
  }
}

void Gathers::drop() noexcept {
  open_ = {};
  flights_.clear();
  events_.clear();
}

void Gathers::wait() {
  POISE_CHECK(open_.bucket == nullptr, "a bucket is not full");
  while (!flights_.empty()) land();
  for (const auto& event : std::exchange(events_, {})) event.wait();
}

}  // namespace poise::zero
