// The hook on a gradient accumulator, and what it does with a gradient.
#include "zero/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "core/launch.h"
#include "kernels/accumulate.h"
#include "kernels/norm.h"
#include "poise/log.h"

namespace poise::zero {

using Use = Accumulators::Use;

// What hooks share with their Gradients; hooks cannot be removed from an accumulator, so they look
// here.
struct Gradients::Shared {
  Gradients* owner = nullptr;  // null once the owner is gone
  std::atomic<bool> taking{false};
};

struct Gradients::Hook : torch::autograd::FunctionPreHook {
  Hook(std::shared_ptr<Shared> shared, int entry) : shared(std::move(shared)), entry(entry) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (!shared->taking.load(std::memory_order_acquire)) return gradients;
    if (gradients[0].defined()) shared->owner->take(entry, gradients[0]);
    return {at::Tensor()};
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    fail("zero",
         "compiled autograd cannot run poise's gradient hooks; switch it off "
         "(torch._dynamo.config.compiled_autograd = False)");
  }

  std::shared_ptr<Shared> shared;
  int entry;
};

Gradients::Gradients(const ParamTable& table, FlatStore& store, const Shards& shards,
                     const comm::Ranks& ranks, const config::ZeroPolicy& policy,
                     Following& following, const memory::Ledger& ledger)
    : table_(table),
      store_(store),
      shards_(shards),
      replicas_(*ranks.replica),
      following_(following),
      reducer_(table, store, shards, *ranks.shard, policy, following, ledger),
      norm_valid_(table.entries().size()),
      shared_(std::make_shared<Shared>()) {
  shared_->owner = this;
  if (replicas_.size() > 1) {
    std::int64_t largest = 0;
    for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
      if (!table.flats()[static_cast<std::size_t>(flat)].trainable) continue;
      largest = std::max(largest, shards.shard(flat) * std::int64_t{sizeof(float)});
    }
    memory::AccountScope scope(ledger, memory::Account::communication);
    replicas_.reserve_all_reduce(largest);
  }
  squared_norms_ =
      at::zeros({static_cast<std::int64_t>(norm_valid_.size())},
                at::TensorOptions().dtype(at::kDouble).device(store.accumulators().device()));
  for (std::size_t i = 0; i < norm_valid_.size(); ++i) {
    if (!table.entries()[i].trainable) continue;
    auto accumulator = torch::autograd::impl::grad_accumulator(store.parameters()[i]);
    accumulator->add_pre_hook(std::make_unique<Hook>(shared_, static_cast<int>(i)));
    accumulators_.push_back(std::move(accumulator));
  }
}

Gradients::~Gradients() {
  shared_->taking = false;
  shared_->owner = nullptr;
}

Gradients::Taking::Taking(Gradients& gradients, MicroBatch position, Count count)
    : gradients_(gradients) {
  gradients_.counts_ = count == Count::yes;
  gradients_.begin_micro_batch(position);
  gradients_.shared_->taking.store(true, std::memory_order_release);
}

Gradients::Taking::~Taking() { gradients_.shared_->taking.store(false, std::memory_order_release); }

void Gradients::begin_micro_batch(MicroBatch position) {
  position_ = position;
  const bool joined_now = joins(position);
  // Ranks that join once per window may have had different numbers of micro-batches.
  if (shards_.reduces_every_micro_batch() || shards_.splits_parameters()) {
    following_.take(Following::Operation::begin_micro_batch, joined_now ? 1 : 0);
  }
  reducer_.begin_micro_batch(joined_now);
}

void Gradients::end_micro_batch() {
  reducer_.end_micro_batch();
  if (shards_.reduces_every_micro_batch() || shards_.splits_parameters()) {
    following_.take(Following::Operation::end_micro_batch);
  }
}

void Gradients::follow_micro_batch(MicroBatch position) {
  begin_micro_batch(position);
  end_micro_batch();
  if (joins(position) && !shards_.splits_parameters()) reducer_.follow_late();
}

// The gradient with its elements in the order of the flat: dense, strided like the parameter.
at::Tensor Gradients::dense(int entry, const at::Tensor& gradient) {
  auto whole = gradient;
  if (whole.layout() != at::kStrided) {
    if (!sparse_noted_) {
      log::info("the gradient of parameter '",
                table_.entries()[static_cast<std::size_t>(entry)].name,
                "' is sparse; sparse gradients are made dense (said once)");
      sparse_noted_ = true;
    }
    whole = whole.to_dense();
  }
  const auto& parameter = store_.parameters()[static_cast<std::size_t>(entry)];
  const auto type = whole.scalar_type();
  const bool known_type = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  // One that is to be read with its signs turned, as of complex numbers, has the memory of another.
  const bool as_it_lies = !whole.is_neg() && !whole.is_conj();
  if (whole.strides() == parameter.strides() && known_type && as_it_lies) return whole;
  auto ordered = at::empty_strided(parameter.sizes(), parameter.strides(),
                                   whole.options().dtype(known_type ? type : at::kFloat));
  ordered.copy_(whole);
  return ordered;
}

void Gradients::take(int entry, const at::Tensor& gradient) {
  if (!counts_) return;
  at::NoGradGuard no_grad;
  const auto& place = table_.entries()[static_cast<std::size_t>(entry)];
  auto& pile = reducer_.pile_of(place.flat);
  auto& arrived = pile.arrived[static_cast<std::size_t>(reducer_.place_of(entry))];
  const auto ordered = dense(entry, gradient).to(pile.sum.device());
  // With one rank the window's last pass over memory also makes the norm.
  const bool makes_norm =
      position_ == MicroBatch::last && shards_.size() == 1 && replicas_.size() == 1;
  if (pile.sum.scalar_type() == at::kFloat) {
    auto* norm = makes_norm ? squared_norms_.mutable_data_ptr<double>() + entry : nullptr;
    kernels::accumulate(launch_for(pile.sum.device()),
                        arrived ? kernels::Accumulate::add : kernels::Accumulate::write,
                        pile.sum.mutable_data_ptr<float>() + place.offset,
                        kernel_dtype(ordered.scalar_type()), ordered.const_data_ptr(), place.numel,
                        1.0f, norm);
    norm_valid_[static_cast<std::size_t>(entry)] = makes_norm;
  } else {  // 16-bit accumulators, only where the config asks for them
    auto target = store_.view_of(entry, pile.sum);
    if (arrived) {
      target.add_(ordered);
    } else {
      target.copy_(ordered);
    }
    norm_valid_[static_cast<std::size_t>(entry)] = false;
  }
  arrived = 1;
  reducer_.added(entry);
}

double Gradients::squares_so_far() {
  at::NoGradGuard no_grad;
  const bool joined = shards_.reduces_every_micro_batch();
  double total = 0;
  for (int f = 0; f < static_cast<int>(table_.flats().size()); ++f) {
    const auto& layout = table_.flats()[static_cast<std::size_t>(f)];
    if (!layout.trainable) continue;
    const auto shard = shards_.mine(f);
    const auto sum = joined ? store_.gradient_shard(f, Use::read) : reducer_.pile_of(f).sum;
    std::vector<kernels::Piece> pieces;
    for (std::size_t i = 0; i < layout.entries.size(); ++i) {
      const auto& entry = table_.entries()[static_cast<std::size_t>(layout.entries[i])];
      const Range whole{entry.offset, entry.offset + entry.numel};
      if (!joined && reducer_.pile_of(f).arrived[i]) pieces.push_back({whole.begin, whole.end});
      if (!joined) continue;
      const auto part = overlap(whole, shard);
      pieces.push_back({part.begin - shard.begin, part.end - shard.begin});
    }
    if (pieces.empty()) continue;
    const auto count = static_cast<std::int64_t>(pieces.size());
    const auto squares = at::zeros({count}, sum.options().dtype(at::kDouble));
    kernels::squared_norms(launch_for(sum.device()), kernel_dtype(sum.scalar_type()),
                           sum.const_data_ptr(), pieces.data(), count,
                           squares.mutable_data_ptr<double>());
    const auto here = squares.cpu();
    for (std::int64_t i = 0; i < count; ++i) total += here.const_data_ptr<double>()[i];
  }
  return total;
}

void Gradients::join_window() {
  if (!reducer_.window_joined()) follow_micro_batch(MicroBatch::last);  // closed before its time
}

void Gradients::finish_window() {
  reducer_.zero_what_never_came();
  join_replicas();
  make_norms();
  store_.accumulators().settle();
}

// What the ranks of a shard group have summed, each its shard, is summed with that of the other
// shard groups: once per window.
void Gradients::join_replicas() {
  if (replicas_.size() == 1 || replicas_joined_) return;
  replicas_joined_ = true;
  std::vector<Event> events;
  for (int flat = 0; flat < static_cast<int>(table_.flats().size()); ++flat) {
    const auto& layout = table_.flats()[static_cast<std::size_t>(flat)];
    if (!layout.trainable || layout.numel == 0) continue;
    const auto& unit = table_.units()[static_cast<std::size_t>(layout.unit)];
    const auto event = replicas_.all_reduce(store_.gradient_shard(flat, Use::write),
                                            join("gradients of ", unit, " over replicas"));
    if (store_.accumulators().away()) {  // the next one takes its room
      following_.wait(event);
    } else {
      events.push_back(event);
    }
  }
  for (const auto& event : events) following_.wait(event);
}

// One call for a flat's entries that follow each other: on a GPU each call costs several of the
// driver's.
void Gradients::make_norms() {
  for (int flat = 0; flat < static_cast<int>(table_.flats().size()); ++flat) {
    const auto& entries = table_.flats()[static_cast<std::size_t>(flat)].entries;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const bool follows = i > begin && entries[i] == entries[i - 1] + 1;
      const bool wanted = table_.entries()[static_cast<std::size_t>(entries[i])].trainable &&
                          !norm_valid_[static_cast<std::size_t>(entries[i])];
      if (i > begin && (!follows || !wanted)) {
        make_norms_of(flat, begin, i);
        begin = i;
      }
      if (!wanted) begin = i + 1;
    }
    make_norms_of(flat, begin, entries.size());
  }
}

void Gradients::make_norm(int entry) {
  const int flat = table_.entries()[static_cast<std::size_t>(entry)].flat;
  const auto& entries = table_.flats()[static_cast<std::size_t>(flat)].entries;
  const auto place = std::find(entries.begin(), entries.end(), entry) - entries.begin();
  make_norms_of(flat, static_cast<std::size_t>(place), static_cast<std::size_t>(place) + 1);
}

// Of the flat's entries [begin, end), whose numbers follow each other.
void Gradients::make_norms_of(int flat, std::size_t begin, std::size_t end) {
  if (begin >= end) return;
  at::NoGradGuard no_grad;
  const auto& entries = table_.flats()[static_cast<std::size_t>(flat)].entries;
  const auto shard = shards_.mine(flat);
  const auto sum = store_.gradient_shard(flat, Use::read);
  std::vector<kernels::Piece> pieces;
  for (std::size_t i = begin; i < end; ++i) {
    const auto& place = table_.entries()[static_cast<std::size_t>(entries[i])];
    const auto range = overlap({place.offset, place.offset + place.numel}, shard);
    pieces.push_back({range.begin - shard.begin, range.end - shard.begin});
    norm_valid_[static_cast<std::size_t>(entries[i])] = true;
  }
  kernels::squared_norms(launch_for(sum.device()), kernel_dtype(sum.scalar_type()),
                         sum.const_data_ptr(), pieces.data(),
                         static_cast<std::int64_t>(pieces.size()),
                         squared_norms_.mutable_data_ptr<double>() + entries[begin]);
}

void Gradients::start_window() {
  std::fill(norm_valid_.begin(), norm_valid_.end(), 0);
  replicas_joined_ = false;
  store_.accumulators().forget();
  reducer_.start_window();
}

}  // namespace poise::zero
