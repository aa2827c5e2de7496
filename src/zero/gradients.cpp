// The hook on a gradient accumulator, and what it does with a gradient.
#include "zero/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <exception>
#include <mutex>

#include "core/launch.h"
#include "kernels/accumulate.h"
#include "kernels/norm.h"
#include "poise/log.h"

namespace poise::zero {

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

Gradients::Gradients(const ParamTable& table, FlatStore& store)
    : table_(table),
      store_(store),
      entries_(table.entries().size()),
      shared_(std::make_shared<Shared>()) {
  shared_->owner = this;
  const auto device = store.parameters().front().device();
  squared_norms_ = at::zeros({static_cast<std::int64_t>(entries_.size())},
                             at::TensorOptions().dtype(at::kDouble).device(device));
  for (std::size_t i = 0; i < entries_.size(); ++i) {
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

Gradients::Taking::Taking(Gradients& gradients, bool last) : gradients_(gradients) {
  gradients_.last_ = last;
  gradients_.shared_->taking.store(true, std::memory_order_release);
}

Gradients::Taking::~Taking() { gradients_.shared_->taking.store(false, std::memory_order_release); }

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
  if (whole.strides() == parameter.strides() && known_type) return whole;
  auto ordered = at::empty_strided(parameter.sizes(), parameter.strides(),
                                   whole.options().dtype(known_type ? type : at::kFloat));
  ordered.copy_(whole);
  return ordered;
}

void Gradients::take(int entry, const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  auto& state = entries_[static_cast<std::size_t>(entry)];
  const auto& place = table_.entries()[static_cast<std::size_t>(entry)];
  const auto& flat = store_.flat(place.flat).accumulator;
  const auto ordered = dense(entry, gradient);
  if (flat.scalar_type() == at::kFloat) {
    auto* norm = last_ ? squared_norms_.mutable_data_ptr<double>() + entry : nullptr;
    kernels::accumulate(launch_for(flat.device()),
                        state.arrived ? kernels::Accumulate::add : kernels::Accumulate::write,
                        flat.mutable_data_ptr<float>() + place.offset,
                        kernel_dtype(ordered.scalar_type()), ordered.const_data_ptr(), place.numel,
                        1.0f, norm);
    state.norm_valid = last_;
  } else {  // 16-bit accumulators, only where the config asks for them
    auto target = store_.view_of(entry, flat);
    if (state.arrived) {
      target.add_(ordered);
    } else {
      target.copy_(ordered);
    }
    state.norm_valid = false;
  }
  state.arrived = true;
}

void Gradients::finish_window() {
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& place = table_.entries()[i];
    if (!place.trainable) continue;
    auto& state = entries_[i];
    if (!state.arrived) {  // unused parameters count as zero
      store_.flat(place.flat).accumulator.narrow(0, place.offset, place.numel).zero_();
      state = {true, false};
    }
    if (!state.norm_valid) make_norm(static_cast<int>(i));
  }
}

void Gradients::make_norm(int entry) {
  const auto& place = table_.entries()[static_cast<std::size_t>(entry)];
  const auto& flat = store_.flat(place.flat).accumulator;
  const kernels::Piece piece{place.offset, place.offset + place.numel};
  kernels::squared_norms(launch_for(flat.device()), kernel_dtype(flat.scalar_type()),
                         flat.const_data_ptr(), &piece, 1,
                         squared_norms_.mutable_data_ptr<double>() + entry);
  entries_[static_cast<std::size_t>(entry)].norm_valid = true;
}

void Gradients::invalidate_norm(int entry) {
  entries_[static_cast<std::size_t>(entry)].norm_valid = false;
}

void Gradients::start_window() {
  for (auto& state : entries_) state = {};
}

}  // namespace poise::zero
