// Makes the flats, re-homes parameters into them, and notices when the user edits or moves one.
#include "zero/flat_store.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

#include "core/scalar_type.h"
#include "poise/log.h"

namespace poise::zero {
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
                     comm::Group& group, const memory::Ledger& ledger)
    : table_(table), shards_(shards), group_(group), flats_(table.flats().size()) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& named : model.parameters) by_name.emplace(named.name, named.tensor);
  for (const auto& entry : table.entries()) parameters_.push_back(by_name.at(entry.name));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    refuse_hooks_that_cannot_run(table.entries()[i].name, parameters_[i]);
  }
  for (int flat = 0; flat < static_cast<int>(flats_.size()); ++flat) rehome(policy, flat, ledger);
  for (const auto& parameter : parameters_) versions_.push_back(parameter._version());
}

// The flat's parameters as the user made them on rank 0, in their own dtype; one flat at a time, so
// that nobody holds a second copy of the model.
at::Tensor FlatStore::original_values(int index) {
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  const auto device = parameters_[static_cast<std::size_t>(layout.entries.front())].device();
  auto original =
      at::zeros({shards_.whole(index)}, at::TensorOptions().device(device).dtype(layout.dtype));
  for (const int entry : layout.entries) {
    view_of(entry, original).copy_(parameters_[static_cast<std::size_t>(entry)]);
  }
  group_.broadcast(original.view(at::kByte), 0, label(index)).wait();
  return original;
}

void FlatStore::rehome(const config::PrecisionPolicy& policy, int index,
                       const memory::Ledger& ledger) {
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
  if (shards_.size() > 1) {
    AccountScope scope(ledger, Account::staging);
    original = original_values(index);
  }
  const auto range = shards_.optimized(index);
  const auto fill = [&](const at::Tensor& target) {
    if (original.defined()) {
      target.copy_(target.numel() == original.numel()
                       ? original
                       : original.narrow(0, range.begin, range.size()));
      return;
    }
    for (const int entry : layout.entries) {
      view_of(entry, target).copy_(parameters_[static_cast<std::size_t>(entry)]);
    }
  };
  {
    AccountScope scope(ledger, Account::parameters);
    tensors.values = at::zeros({shards_.whole(index)}, options.dtype(kept));
    fill(tensors.values);
  }
  if (layout.trainable) {
    tensors.own_master = kept != at::kFloat;
    if (!tensors.own_master) {
      tensors.master = tensors.values.narrow(0, range.begin, range.size());
    } else {
      AccountScope scope(ledger, Account::optimizer);
      tensors.master = at::zeros({range.size()}, options.dtype(at::kFloat));
      fill(tensors.master);
    }
    AccountScope scope(ledger, Account::gradients);
    const auto numel = shards_.splits_gradients() ? shards_.shard(index) : shards_.whole(index);
    tensors.accumulator =
        at::zeros({numel}, options.dtype(policy.fp32_accumulation ? at::kFloat : kept));
  }
  for (const int entry : layout.entries) {
    auto& parameter = parameters_[static_cast<std::size_t>(entry)];
    if (layout.trainable) parameter.mutable_grad().reset();  // nothing stale is ever applied
    // Before gradient accumulators exist: a change of dtype would drop their hooks.
    parameter.set_data(view_of(entry, tensors.values));
  }
}

at::Tensor FlatStore::view_of(int entry, const at::Tensor& flat) const {
  const auto& place = table_.entries()[static_cast<std::size_t>(entry)];
  const auto& parameter = parameters_[static_cast<std::size_t>(entry)];
  return flat.as_strided(parameter.sizes(), parameter.strides(),
                         flat.storage_offset() + place.offset);
}

void FlatStore::notice_edits() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& entry = table_.entries()[i];
    const auto& parameter = parameters_[i];
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
  if (!tensors.own_master) return;
  const auto optimized = shards_.optimized(entry.flat);
  const auto range = overlap({entry.offset, entry.offset + entry.numel}, optimized);
  if (range.size() == 0) return;
  tensors.master.narrow(0, range.begin - optimized.begin, range.size())
      .copy_(tensors.values.narrow(0, range.begin, range.size()));
}

at::Tensor FlatStore::optimized_values(int index) {
  const auto range = shards_.optimized(index);
  return flat(index).values.narrow(0, range.begin, range.size());
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
  return group_.all_gather(values, values.narrow(0, range.begin, range.size()), label(index));
}

Event FlatStore::gather_gradient(int index) {
  return group_.all_gather(flat(index).accumulator, gradient_shard(index),
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
  group_.all_gather(whole, mine, join(what, " of ", label(index))).wait();
  return whole;
}

at::Tensor FlatStore::whole_master(int index) {
  const auto& tensors = flat(index);
  if (!tensors.master.defined()) return tensors.values;
  if (!shards_.splits_optimizer()) return tensors.master;
  return tensors.own_master ? gathered(tensors.master, index, "master") : tensors.values;
}

at::Tensor FlatStore::whole_gradient(int index) {
  if (!shards_.splits_optimizer()) return flat(index).accumulator;
  return gathered(gradient_shard(index), index, "gradient");
}

}  // namespace poise::zero
