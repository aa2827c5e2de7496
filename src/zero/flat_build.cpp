// Makes the flats: every parameter moves into memory of the engine's, once.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

#include "core/scalar_type.h"
#include "poise/log.h"
#include "poise/zero.h"
#include "zero/flat_store.h"

namespace poise::zero {

at::Tensor without_memory(const at::Tensor& like, c10::Device device, const std::string& message) {
  auto tensor = at::empty({0}, like.options().device(device).requires_grad(false));
  const auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), like.nbytes(), c10::DataPtr(nullptr, device), nullptr,
      /*resizable=*/false));
  tensor.set_(storage, 0, like.sizes(), like.strides());
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return tensor;
}

void refuse_hooks_that_cannot_run(const std::string& name, const at::Tensor& parameter) {
  // Only a tensor that requires gradients has the metadata that hooks live in.
  if (parameter.requires_grad() && torch::autograd::impl::post_acc_grad_hooks(parameter)) {
    fail("zero", "parameter '", name,
         "' has a post-accumulate-grad hook, which never runs here because "
         "gradients go straight into poise's accumulators; remove the hook, or read "
         "engine.gradient(name) after begin_update()");
  }
}

namespace {

using memory::Account;
using memory::AccountScope;

// Trainable floating parameters take the policy's type. Frozen ones only ever shrink: a frozen
// 16-bit base under fp32 adapters stays 16-bit. Other types (integer, complex) stay as they are.
at::ScalarType kept_type(const ParamTable::Flat& flat, const config::PrecisionPolicy& policy) {
  const auto wanted = scalar_type(policy.parameters);
  if (!at::isFloatingType(flat.dtype)) return flat.dtype;
  if (flat.trainable) return wanted;
  return c10::elementSize(wanted) < c10::elementSize(flat.dtype) ? wanted : flat.dtype;
}

at::Tensor poison_like(const at::Tensor& parameter, const std::string& name) {
  return without_memory(parameter, parameter.device(),
                        join("[zero] parameter '", name,
                             "' is sharded over the ranks or offloaded, and not gathered now; run "
                             "the model through the engine, "
                             "its blocks through their units, or use engine.gathered()"));
}

}  // namespace

// All that the destructor needs: from here on it runs, also where the rest of the making fails.
FlatStore::FlatStore(const ModelView& model, const ParamTable& table, const Shards& shards,
                     const comm::Ranks& ranks, const memory::Ledger& ledger)
    : table_(table),
      shards_(shards),
      ranks_(ranks),
      ledger_(ledger),
      device_(model.target()),
      flats_(table.flats().size()),
      poisons_(table.entries().size()) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& named : model.parameters) by_name.emplace(named.name, named.tensor);
  for (const auto& entry : table.entries()) parameters_.push_back(by_name.at(entry.name));
  note_given();
}

FlatStore::FlatStore(const ModelView& model, const ParamTable& table,
                     const config::PrecisionPolicy& policy, const Shards& shards,
                     const comm::Ranks& ranks, const memory::Ledger& ledger, const Places& places,
                     const std::function<void(const std::string&)>& materialize)
    : FlatStore(model, table, shards, ranks, ledger) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    refuse_hooks_that_cannot_run(table.entries()[i].name, parameters_[i]);
  }
  std::vector<offload::SpanPtr> accumulators(flats_.size());
  int made = -1;  // the last unit that has its values
  for (int flat = 0; flat < static_cast<int>(flats_.size()); ++flat) {
    const int unit = table.flats()[static_cast<std::size_t>(flat)].unit;
    // One whose parameters all live elsewhere, being tied, has no flat.
    while (materialize && ranks.all->rank() == 0 && made < unit) {
      AccountScope scope(ledger_, Account::staging);
      materialize(table.units()[static_cast<std::size_t>(++made)]);
    }
    rehome(policy, places, flat, accumulators[static_cast<std::size_t>(flat)]);
  }
  accumulators_.emplace(std::move(accumulators), places.memory);
  for (const auto& parameter : parameters_) versions_.push_back(parameter._version());
}

FlatStore::~FlatStore() {
  if (!is_made_) give_back(Together::no);
}

void FlatStore::copy_parameters(int index, const at::Tensor& target) {
  for (const int entry : table_.flats()[static_cast<std::size_t>(index)].entries) {
    view_of(entry, target).copy_(given(entry));
  }
}

// A parameter as the user made it.
const at::Tensor& FlatStore::given(int entry) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(entry)];
  if (parameter.numel() > 0 && parameter.storage().nbytes() == 0) {
    fail("zero", "parameter '", table_.entries()[static_cast<std::size_t>(entry)].name,
         "' has no memory and was given none; set it in `materialize`");
  }
  return parameter;
}

// The flat's parameters as the user made them on rank 0, in their own dtype; one flat at a time, so
// that nobody holds a second copy of the model.
at::Tensor FlatStore::original_values(int index) {
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  auto original =
      at::zeros({shards_.whole(index)}, at::TensorOptions().device(device_).dtype(layout.dtype));
  if (ranks_.all->rank() == 0) copy_parameters(index, original);
  ranks_.all->broadcast(original.view(at::kByte), 0, label(index)).wait();
  return original;
}

// Elements of `range` of the values before any cast, parameter by parameter: no whole copy is made
// for a file.
void FlatStore::fill(offload::Span& span, int index, const at::Tensor& original, Range range) {
  if (original.defined()) {
    span.write(0, original.narrow(0, range.begin, range.size()));
    return;
  }
  for (const int entry : table_.flats()[static_cast<std::size_t>(index)].entries) {  // one rank
    const auto& parameter = given(entry);
    span.write(table_.entries()[static_cast<std::size_t>(entry)].offset,
               parameter.detach().as_strided({parameter.numel()}, {1}));
  }
}

void FlatStore::rehome(const config::PrecisionPolicy& policy, const Places& places, int index,
                       offload::SpanPtr& accumulator) {
  at::NoGradGuard no_grad;
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  auto& tensors = flats_[static_cast<std::size_t>(index)];
  const auto options = at::TensorOptions().device(device_).requires_grad(false);
  const auto kept = kept_type(layout, policy);
  if (kept != layout.dtype && layout.trainable && layout.dtype != at::kFloat) {
    log::info("parameters of unit '", table_.units()[static_cast<std::size_t>(layout.unit)],
              "' are cast from ", layout.dtype, " to ", kept, " (precision.parameters)");
  }
  hold_what_is_lost(index, kept);
  at::Tensor original;
  if (ranks_.all->size() > 1) {
    AccountScope scope(ledger_, Account::staging);
    original = original_values(index);
  }
  const auto place = [&](const std::shared_ptr<offload::Store>& store, std::int64_t numel,
                         at::ScalarType type) {
    return store ? store->reserve(numel, type)
                 : offload::resident(at::zeros({numel}, options.dtype(type)));
  };
  if (shards_.splits_parameters(index)) {
    const auto mine = shards_.mine(index);
    {
      AccountScope scope(ledger_, Account::parameters);
      tensors.shard = place(places.parameters, mine.size(), kept);
      fill(*tensors.shard, index, original, mine);
    }
    AccountScope scope(ledger_, Account::gathered);
    tensors.values = at::empty({shards_.whole(index)}, options.dtype(kept));
  } else {
    AccountScope scope(ledger_, Account::parameters);
    tensors.values = at::zeros({shards_.whole(index)}, options.dtype(kept));
    if (original.defined()) {
      tensors.values.copy_(original);
    } else {
      copy_parameters(index, tensors.values);
    }
  }
  if (layout.trainable) {
    tensors.own_master = kept != at::kFloat;
    if (!tensors.own_master) {
      tensors.master = optimized_values(index);
    } else {
      AccountScope scope(ledger_, Account::optimizer);
      const auto range = shards_.optimized(index);
      tensors.master =
          place(places.masters[static_cast<std::size_t>(index)], range.size(), at::kFloat);
      fill(*tensors.master, index, original, range);
    }
    AccountScope scope(ledger_, Account::gradients);
    const auto numel = shards_.splits_gradients() ? shards_.shard(index) : shards_.whole(index);
    accumulator = place(places.gradients, numel, policy.fp32_accumulation ? at::kFloat : kept);
  }
  for (const int entry : layout.entries) {
    auto& parameter = parameters_[static_cast<std::size_t>(entry)];
    given_[static_cast<std::size_t>(entry)].taken = true;
    if (layout.trainable) parameter.mutable_grad().reset();  // nothing stale is ever applied
    // Before gradient accumulators exist: a change of dtype would drop their hooks.
    parameter.set_data(view_of(entry, tensors.values));
    if (shards_.splits_parameters(index)) {
      poisons_[static_cast<std::size_t>(entry)] =
          poison_like(parameter, table_.entries()[static_cast<std::size_t>(entry)].name);
    }
  }
  if (shards_.splits_parameters(index)) release(index);
}

}  // namespace poise::zero
