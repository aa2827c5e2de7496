// Makes the flats, re-homes parameters into them, and notices when the user edits or moves one.
#include "zero/flat_store.h"

#include <ATen/core/grad_mode.h>
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
                     const config::PrecisionPolicy& policy, const memory::Ledger& ledger)
    : table_(table), flats_(table.flats().size()) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& named : model.parameters) by_name.emplace(named.name, named.tensor);
  for (const auto& entry : table.entries()) parameters_.push_back(by_name.at(entry.name));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    refuse_hooks_that_cannot_run(table.entries()[i].name, parameters_[i]);
  }
  for (int flat = 0; flat < static_cast<int>(flats_.size()); ++flat)
    rehome(model, policy, flat, ledger);
  for (const auto& parameter : parameters_) versions_.push_back(parameter._version());
}

void FlatStore::rehome(const ModelView&, const config::PrecisionPolicy& policy, int index,
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
  {
    AccountScope scope(ledger, Account::parameters);
    tensors.values = at::zeros({layout.numel}, options.dtype(kept));
  }
  if (layout.trainable) {
    if (kept == at::kFloat) {
      tensors.master = tensors.values;
    } else {
      AccountScope scope(ledger, Account::optimizer);
      tensors.master = at::zeros({layout.numel}, options.dtype(at::kFloat));
    }
    AccountScope scope(ledger, Account::gradients);
    tensors.accumulator =
        at::zeros({layout.numel}, options.dtype(policy.fp32_accumulation ? at::kFloat : kept));
  }
  for (const int entry : layout.entries) {
    auto& parameter = parameters_[static_cast<std::size_t>(entry)];
    if (layout.trainable) {
      view_of(entry, tensors.master).copy_(parameter);
      parameter.mutable_grad().reset();  // nothing stale is ever applied
    }
    const auto home = view_of(entry, tensors.values);
    home.copy_(parameter);
    // Before gradient accumulators exist: a change of dtype would drop their hooks.
    parameter.set_data(home);
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

void FlatStore::refresh(int entry) {
  at::NoGradGuard no_grad;
  auto& tensors =
      flats_[static_cast<std::size_t>(table_.entries()[static_cast<std::size_t>(entry)].flat)];
  if (!tensors.master.defined() || tensors.master.is_same(tensors.values)) return;
  view_of(entry, tensors.master).copy_(view_of(entry, tensors.values));
}

}  // namespace poise::zero
