// Makes the flats, re-homes parameters into them, and notices when the user edits or moves one.
#include "zero/flat_store.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

#include "core/scalar_type.h"
#include "poise/log.h"
#include "poise/zero.h"

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

void give_memory(const at::Tensor& flat) {
  const c10::DeviceGuard guard(flat.device());  // the allocator takes the current one
  auto* storage = flat.storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<std::size_t>(flat.numel()) * flat.element_size();
  storage->set_data_ptr_noswap(c10::GetAllocator(flat.device().type())->allocate(bytes));
  storage->set_nbytes(bytes);
}

void take_memory(const at::Tensor& flat) {
  auto* storage = flat.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, flat.device()));
  storage->set_nbytes(0);
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

}  // namespace

FlatStore::FlatStore(const ModelView& model, const ParamTable& table,
                     const config::PrecisionPolicy& policy, const Shards& shards,
                     const comm::Ranks& ranks, const memory::Ledger& ledger, const Places& places,
                     const std::function<void(const std::string&)>& materialize)
    : table_(table),
      shards_(shards),
      ranks_(ranks),
      ledger_(ledger),
      flats_(table.flats().size()),
      poisons_(table.entries().size()) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& named : model.parameters) by_name.emplace(named.name, named.tensor);
  for (const auto& entry : table.entries()) parameters_.push_back(by_name.at(entry.name));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    refuse_hooks_that_cannot_run(table.entries()[i].name, parameters_[i]);
  }
  int made = -1;  // the unit that has its values
  for (int flat = 0; flat < static_cast<int>(flats_.size()); ++flat) {
    const int unit = table.flats()[static_cast<std::size_t>(flat)].unit;
    if (materialize && ranks.all->rank() == 0 && unit != made) {
      AccountScope scope(ledger_, Account::staging);
      materialize(table.units()[static_cast<std::size_t>(unit)]);
      made = unit;
    }
    rehome(policy, places, flat);
  }
  for (const auto& parameter : parameters_) versions_.push_back(parameter._version());
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
  const auto device = parameters_[static_cast<std::size_t>(layout.entries.front())].device();
  auto original =
      at::zeros({shards_.whole(index)}, at::TensorOptions().device(device).dtype(layout.dtype));
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

void FlatStore::rehome(const config::PrecisionPolicy& policy, const Places& places, int index) {
  at::NoGradGuard no_grad;
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  auto& tensors = flats_[static_cast<std::size_t>(index)];
  const auto device = parameters_[static_cast<std::size_t>(layout.entries.front())].device();
  const auto options = at::TensorOptions().device(device).requires_grad(false);
  const auto kept = kept_type(layout, policy);
  if (kept != layout.dtype && layout.trainable && layout.dtype != at::kFloat) {
    log::info("parameters of unit '", table_.units()[static_cast<std::size_t>(layout.unit)],
              "' are cast from ", layout.dtype, " to ", kept, " (precision.parameters)");
  }
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
    tensors.accumulator =
        place(places.gradients, numel, policy.fp32_accumulation ? at::kFloat : kept)->tensor();
  }
  for (const int entry : layout.entries) {
    auto& parameter = parameters_[static_cast<std::size_t>(entry)];
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

at::Tensor FlatStore::view_of(int entry, const at::Tensor& flat) const {
  const auto& place = table_.entries()[static_cast<std::size_t>(entry)];
  const auto& parameter = parameters_[static_cast<std::size_t>(entry)];
  return flat.as_strided(parameter.sizes(), parameter.strides(),
                         flat.storage_offset() + place.offset);
}

bool FlatStore::has_edits() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (shards_.splits_parameters(table_.entries()[i].flat)) continue;
    if (parameters_[i]._version() != versions_[i]) return true;
  }
  return false;
}

void FlatStore::notice_edits() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& entry = table_.entries()[i];
    const auto& parameter = parameters_[i];
    refuse_hooks_that_cannot_run(entry.name, parameter);
    if (parameter.requires_grad() != entry.trainable) {
      fail("zero", "parameter '", entry.name, "' was ", entry.trainable ? "trained" : "frozen",
           " when the engine was made, and is ", entry.trainable ? "frozen" : "to be trained",
           " now; set requires_grad back, or make the engine anew");
    }
    if (shards_.splits_parameters(entry.flat)) continue;  // edited in gathered(), taken over there
    const auto& values = flats_[static_cast<std::size_t>(entry.flat)].values;
    const auto* home =
        static_cast<const char*>(values.const_data_ptr()) + entry.offset * values.element_size();
    if (parameter.scalar_type() != values.scalar_type() ||
        (entry.numel > 0 && static_cast<const char*>(parameter.const_data_ptr()) != home)) {
      fail("zero", "parameter '", entry.name,
           "' no longer lives in poise's memory (it was moved or cast "
           "after the engine was built); make such changes before the engine, or build a new "
           "engine");
    }
    const auto version = parameter._version();
    if (version == versions_[i]) continue;
    versions_[i] = version;
    if (!edit_noted_) {
      log::info("parameter '", entry.name,
                "' was edited between updates; its master follows (said once)");
      edit_noted_ = true;
    }
    refresh(static_cast<int>(i));
  }
}

void FlatStore::refresh(int index) {
  at::NoGradGuard no_grad;
  const auto& entry = table_.entries()[static_cast<std::size_t>(index)];
  auto& tensors = flats_[static_cast<std::size_t>(entry.flat)];
  if (shards_.splits_parameters(entry.flat)) {
    fail("zero", "refresh('", entry.name,
         "') of a parameter that is sharded over the ranks or offloaded; edit it inside "
         "gathered(writer)");
  }
  if (!tensors.own_master) return;
  const auto optimized = shards_.optimized(entry.flat);
  const auto range = overlap({entry.offset, entry.offset + entry.numel}, optimized);
  if (range.size() == 0) return;
  tensors.master->write(range.begin - optimized.begin,
                        tensors.values.narrow(0, range.begin, range.size()));
}

void FlatStore::make_room(int index) {
  AccountScope scope(ledger_, Account::gathered);
  give_memory(flat(index).values);
}

Event FlatStore::gather_parameters(int index) {
  auto& tensors = flat(index);
  if (tensors.values.numel() == 0) return {};
  const auto here = tensors.shard->tensor();
  const auto range = shards_.mine(index);
  const auto what = join("parameters of ", label(index));
  if (shards_.size() > 1 && here.defined() && here.device() == tensors.values.device()) {
    return ranks_.shard->all_gather(tensors.values, here, what);
  }
  const auto mine = tensors.values.narrow(0, range.begin, range.size());
  const bool directly = here.defined() || mine.device().is_cpu();  // a file knows the CPU only
  if (shards_.size() == 1 && directly) return tensors.shard->fetch(0, mine);
  tensors.shard->read(0, mine);
  return ranks_.shard->all_gather(tensors.values, mine, what);
}

void FlatStore::expose(int index) {
  for (const int entry : table_.flats()[static_cast<std::size_t>(index)].entries) {
    parameters_[static_cast<std::size_t>(entry)].set_data(view_of(entry, flat(index).values));
  }
}

void FlatStore::release(int index) {
  for (const int entry : table_.flats()[static_cast<std::size_t>(index)].entries) {
    parameters_[static_cast<std::size_t>(entry)].set_data(
        poisons_[static_cast<std::size_t>(entry)]);
  }
  take_memory(flat(index).values);
}

void FlatStore::share_values(int index, int writer) {
  at::NoGradGuard no_grad;
  auto& tensors = flat(index);
  if (tensors.values.numel() == 0) return;
  ranks_.all->broadcast(tensors.values.view(at::kByte), writer, label(index)).wait();
  const auto mine = shards_.mine(index);
  if (tensors.shard) tensors.shard->write(0, tensors.values.narrow(0, mine.begin, mine.size()));
  if (tensors.own_master) {
    const auto range = shards_.optimized(index);
    tensors.master->write(0, tensors.values.narrow(0, range.begin, range.size()));
  }
  for (const int entry : table_.flats()[static_cast<std::size_t>(index)].entries) {
    versions_[static_cast<std::size_t>(entry)] =
        parameters_[static_cast<std::size_t>(entry)]._version();
  }
}

void FlatStore::warn_of_lost_edits() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& entry = table_.entries()[i];
    const auto version = parameters_[i]._version();
    if (!shards_.splits_parameters(entry.flat) || version == versions_[i]) continue;
    versions_[i] = version;
    log::warning("parameter '", entry.name,
                 "' was edited in gathered() without a writer: the edit is lost with its end");
  }
}

offload::SpanPtr FlatStore::optimized_values(int index) {
  if (shards_.splits_parameters(index)) return flat(index).shard;
  const auto range = shards_.optimized(index);
  return offload::resident(flat(index).values.narrow(0, range.begin, range.size()));
}

at::Tensor FlatStore::optimized_gradient(int index) {
  return shards_.splits_optimizer() ? gradient_shard(index) : flat(index).accumulator;
}

at::Tensor FlatStore::gradient_shard(int index) {
  const auto& accumulator = flat(index).accumulator;
  if (shards_.splits_gradients()) return accumulator;
  const auto range = shards_.mine(index);
  return accumulator.narrow(0, range.begin, range.size());
}

std::string FlatStore::label(int index) const {
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  return table_.units()[static_cast<std::size_t>(layout.unit)];
}

Event FlatStore::gather_values(int index) {
  const auto range = shards_.mine(index);
  auto& values = flat(index).values;
  return ranks_.shard->all_gather(values, values.narrow(0, range.begin, range.size()),
                                  label(index));
}

Event FlatStore::gather_gradient(int index) {
  return ranks_.shard->all_gather(flat(index).accumulator, gradient_shard(index),
                                  join("gradient of ", label(index)));
}

void FlatStore::write_gradient(int index, const at::Tensor& values) {
  const auto& entry = table_.entries()[static_cast<std::size_t>(index)];
  const auto optimized = shards_.optimized(entry.flat);
  const auto range = overlap({entry.offset, entry.offset + entry.numel}, optimized);
  if (range.size() == 0) return;
  const auto& parameter = parameters_[static_cast<std::size_t>(index)];
  const auto ordered = at::empty({entry.numel}, values.options());
  ordered.as_strided(parameter.sizes(), parameter.strides()).copy_(values);
  optimized_gradient(entry.flat)
      .narrow(0, range.begin - optimized.begin, range.size())
      .copy_(ordered.narrow(0, range.begin - entry.offset, range.size()));
}

at::Tensor FlatStore::gathered(const at::Tensor& mine, int index, const char* what) {
  auto whole = at::empty({shards_.whole(index)}, mine.options());
  ranks_.shard->all_gather(whole, mine, join(what, " of ", label(index))).wait();
  return whole;
}

// A span as a tensor of the model's device; a copy where it is kept elsewhere.
at::Tensor FlatStore::on_device(const offload::SpanPtr& span, int index) {
  const auto device = flat(index).values.device();
  if (const auto here = span->tensor(); here.defined()) return here.to(device);
  auto copy = at::empty({span->numel()}, at::TensorOptions(span->dtype()).device(device));
  span->read(0, copy);
  return copy;
}

at::Tensor FlatStore::whole_master(int index) {
  const auto& tensors = flat(index);
  if (shards_.splits_parameters(index)) {
    return gathered(on_device(tensors.master ? tensors.master : tensors.shard, index), index,
                    "master");
  }
  if (!tensors.own_master) return tensors.values;
  const auto mine = on_device(tensors.master, index);
  return shards_.splits_optimizer() ? gathered(mine, index, "master") : mine;
}

at::Tensor FlatStore::whole_moment(int index, const at::Tensor& moment) {
  return shards_.splits_optimizer() ? gathered(moment, index, "moment") : moment;
}
at::Tensor FlatStore::whole_gradient(int index) {
  if (!shards_.splits_optimizer()) return flat(index).accumulator;
  return gathered(gradient_shard(index), index, "gradient");
}

}  // namespace poise::zero
