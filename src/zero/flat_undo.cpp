// Takes back what flat_build.cpp has done: parameters are as they were before the engine.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <exception>

#include "poise/error.h"
#include "poise/log.h"
#include "poise/zero.h"
#include "zero/flat_store.h"

namespace poise::zero {
namespace {

bool has_no_memory(const at::Tensor& parameter) {
  return parameter.numel() > 0 && parameter.storage().nbytes() == 0;
}

// Whether all values of `from` are values of `in`.
bool fits(at::ScalarType from, at::ScalarType in) {
  if (from == in) return true;
  if (!at::isFloatingType(from) || !at::isFloatingType(in) || c10::isFloat8Type(in)) return false;
  return c10::isFloat8Type(from) || c10::promoteTypes(from, in) == in;
}

}  // namespace

void FlatStore::note_given() {
  for (const auto& parameter : parameters_) {
    given_.push_back({parameter.scalar_type(), parameter.device(), {}, false});
    if (has_no_memory(parameter)) given_.back().values = parameter.detach();
  }
}

// What a cast loses is held besides; on the host, since the device needs its room.
void FlatStore::hold_what_is_lost(int index, at::ScalarType kept) {
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  if (fits(layout.dtype, layout.trainable ? at::kFloat : kept)) return;
  for (const int entry : layout.entries) {
    auto& given = given_[static_cast<std::size_t>(entry)];
    const auto values = parameters_[static_cast<std::size_t>(entry)].detach();
    if (!given.values.defined()) given.values = values.to(at::kCPU);
  }
}

void FlatStore::forget_given() noexcept {
  for (auto& given : given_) given.values.reset();
}

void FlatStore::give_back(Together together) noexcept {
  at::NoGradGuard no_grad;
  std::exception_ptr failure;
  bool lost = false, rounded = false;
  for (int index = 0; index < static_cast<int>(flats_.size()); ++index) {
    try {
      give_back(index, together, rounded);
    } catch (...) {
      lost = true;
      if (!failure) failure = std::current_exception();
    }
  }
  if (!lost && !rounded) return;
  std::string why = "its ranks held parts of it";
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "an exception of another kind";
  }
  log::warning("[zero] a model is not as it was before the engine that was given up: ",
               lost ? "parameters have lost their values" : "parameters were rounded to 16 bits",
               " (", why, "); make the model anew");
}

// A flat's values, as far as they are known, in their own type where that is kept.
at::Tensor FlatStore::values_to_give(int index, Together together, bool& rounded) {
  const auto& layout = table_.flats()[static_cast<std::size_t>(index)];
  auto& tensors = flat(index);
  const bool alone = together == Together::no && shards_.size() > 1;
  if (shards_.splits_parameters(index)) {
    if (alone) fail("zero", "each rank held a shard of unit '", label(index), "'");
    const auto mine = on_device(tensors.own_master ? tensors.master : tensors.shard, index);
    return shards_.size() == 1 ? mine : gathered(mine, index, "values");
  }
  if (!tensors.own_master || tensors.values.scalar_type() == layout.dtype) return tensors.values;
  if (!alone || !shards_.splits_optimizer()) return whole_master(index);
  rounded = true;
  return tensors.values;
}

void FlatStore::give_back(int index, Together together, bool& rounded) {
  const auto& entries = table_.flats()[static_cast<std::size_t>(index)].entries;
  const auto place = [&](int entry) -> Given& { return given_[static_cast<std::size_t>(entry)]; };
  if (entries.empty() || !place(entries.front()).taken) return;
  const auto is_held = [&](int entry) {
    const auto& values = place(entry).values;
    return values.defined() && !(has_no_memory(values) && together == Together::yes);
  };
  try {
    at::Tensor source;
    if (!std::all_of(entries.begin(), entries.end(), is_held)) {
      source = values_to_give(index, together, rounded);
      // One that is there and needs no other place is the parameters' own from now on; else the
      // room of the flat may be what they need.
      const auto& first = place(entries.front());
      const bool moves = source.scalar_type() != first.dtype || source.device() != first.device;
      if (moves && !source.device().is_cpu()) source = source.to(at::kCPU);
      if (moves) flat(index) = {};
    }
    for (const int entry : entries) {
      auto& parameter = parameters_[static_cast<std::size_t>(entry)];
      const auto& given = place(entry);
      auto values = is_held(entry) ? given.values : view_of(entry, source);
      const bool stays = values.scalar_type() == given.dtype && values.device() == given.device;
      if (!stays) {
        const auto options = values.options().dtype(given.dtype).device(given.device);
        const auto own = at::empty_strided(parameter.sizes(), parameter.strides(), options);
        values = own.copy_(values);
      }
      parameter.set_data(values);
    }
  } catch (...) {
    for (const int entry : entries) lose(entry);
    throw;
  }
  for (const int entry : entries) place(entry).taken = false;
}

// What touches it from here on says why it has no values.
void FlatStore::lose(int entry) {
  auto& parameter = parameters_[static_cast<std::size_t>(entry)];
  const auto& name = table_.entries()[static_cast<std::size_t>(entry)].name;
  parameter.set_data(without_memory(
      parameter, parameter.device(),
      join("[zero] parameter '", name,
           "' has lost its values: the engine that they had moved into could not be made, and no "
           "rank had them whole; make the model anew")));
}

}  // namespace poise::zero
