// What becomes of the flats while a model trains: gathered, released, edited, read. flat_build.cpp
// makes them.
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

namespace {

using memory::Account;
using memory::AccountScope;

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

// Looks at neither, which one without memory would not let it.
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

}  // namespace

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
    if (parameter.requires_grad() && !entry.trainable) {
      fail("zero", "parameter '", entry.name,
           "' was frozen when the engine was made, and is to be trained now; set requires_grad "
           "back, or make the engine anew with it trained, and freeze it after that");
    }
    const auto& values = flats_[static_cast<std::size_t>(entry.flat)].values;
    if (shards_.splits_parameters(entry.flat)) {  // edited in gathered(), taken over there
      if (!same_memory(parameter, values) && !same_memory(parameter, poisons_[i])) {
        fail("zero", "parameter '", entry.name,
             "' was given other memory after the engine was built (set_data(), torch::load()), "
             "which "
             "its values, sharded or offloaded, would replace; load before the engine is made, or "
             "copy into it inside gathered(writer)");
      }
      continue;
    }
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
  const auto fetched = tensors.shard->fetch(0, mine);
  if (shards_.size() == 1) return fetched;
  fetched.wait();
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

offload::SpanPtr FlatStore::optimized_gradient(int index) {
  const auto& span = accumulators_->span(index);
  if (!shards_.splits_optimizer() || !span->tensor().defined()) return span;  // in a file: all mine
  return offload::resident(gradient_shard(index, Accumulators::Use::write));
}

at::Tensor FlatStore::gradient_shard(int index, Accumulators::Use use) {
  const auto accumulator = accumulators_->get(index, use);
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
  constexpr auto write = Accumulators::Use::write;
  return ranks_.shard->all_gather(accumulators_->get(index, write), gradient_shard(index, write),
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
  const auto part = ordered.narrow(0, range.begin - entry.offset, range.size());
  const auto sums = shards_.splits_optimizer()
                        ? gradient_shard(entry.flat, Accumulators::Use::write)
                        : accumulators_->get(entry.flat, Accumulators::Use::write);
  sums.narrow(0, range.begin - optimized.begin, range.size()).copy_(part);
}

void FlatStore::write_master(int index, const at::Tensor& values) {
  at::NoGradGuard no_grad;
  const auto& entry = table_.entries()[static_cast<std::size_t>(index)];
  const auto& parameter = parameters_[static_cast<std::size_t>(index)];
  auto& tensors = flat(entry.flat);
  const Range whole{entry.offset, entry.offset + entry.numel};
  // In the order of the parameter's memory, which need not be that of its indices.
  const auto ordered =
      at::empty({entry.numel}, at::TensorOptions(at::kFloat).device(tensors.values.device()));
  ordered.as_strided(parameter.sizes(), parameter.strides()).copy_(values);
  const auto write = [&](offload::Span& span, const Range& kept) {
    const auto range = overlap(whole, kept);
    if (range.size() == 0) return;
    span.write(range.begin - kept.begin,
               ordered.narrow(0, range.begin - entry.offset, range.size()));
  };
  if (tensors.own_master) write(*tensors.master, shards_.optimized(entry.flat));
  if (tensors.shard) {
    write(*tensors.shard, shards_.mine(entry.flat));
  } else {
    tensors.values.narrow(0, entry.offset, entry.numel).copy_(ordered);
    versions_[static_cast<std::size_t>(index)] = parameter._version();
  }
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
  constexpr auto read = Accumulators::Use::read;
  if (!shards_.splits_optimizer()) return accumulators_->get(index, read);
  // Offloaded sums are on the host, the group is on the device.
  return gathered(gradient_shard(index, read).to(flat(index).values.device()), index, "gradient");
}

}  // namespace poise::zero
