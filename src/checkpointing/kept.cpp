// Linear and attention that remember: the first run stores their output in the frame, the second
// takes it from there. Both save for backward what torch's own kernels save, so both runs save
// alike.
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/SDPBackend.h>
#include <torch/csrc/autograd/custom_function.h>

#include "checkpointing/frame.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

bool keeping() {
  const auto* run = Run::current();
  return run && run->frame->options().keep == Options::Keep::marked;
}

// `compute()` in the first run, what it gave then in the second.
template <class Compute>
Tensors kept(const Compute& compute) {
  auto& run = *Run::current();
  auto& store = run.frame->kept();
  if (run.kind == Run::Kind::first) {
    auto outputs = compute();
    for (const auto& output : outputs) store.push_back(output.detach());
    return outputs;
  }
  Tensors outputs;
  const size_t count = compute.num_outputs;
  if (run.next_kept + count > store.size()) {
    fail("checkpointing", "recompute ran more kept operations than forward (", store.size(),
         " outputs); the region must do the same both times");
  }
  for (size_t i = 0; i < count; ++i) outputs.push_back(store[run.next_kept++].detach());
  return outputs;
}

struct ComputeLinear {
  static constexpr size_t num_outputs = 1;
  const at::Tensor &x, &weight;
  const std::optional<at::Tensor>& bias;
  Tensors operator()() const { return {at::linear(x, weight, bias)}; }
};

class KeptLinear : public Function<KeptLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x, at::Tensor weight,
                            std::optional<at::Tensor> bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["biased"] = bias.has_value();
    return kept(ComputeLinear{x, weight, bias})[0];
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto grad = grads[0].reshape({-1, weight.size(0)});
    variable_list result(3);
    if (ctx->needs_input_grad(0)) result[0] = grad.mm(weight).view(x.sizes());
    if (ctx->needs_input_grad(1)) result[1] = grad.t().mm(x.reshape({-1, x.size(-1)}));
    const bool biased = ctx->saved_data["biased"].toBool();
    if (biased && ctx->needs_input_grad(2)) result[2] = grad.sum(0);
    return result;
  }
};

struct ComputeAttention {
  static constexpr size_t num_outputs = 2;
  const at::Tensor &query, &key, &value;
  bool causal;
  Tensors operator()() const {
    auto [output, logsumexp] =
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal);
    return {output, logsumexp};
  }
};

class KeptAttention : public Function<KeptAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx, at::Tensor query, at::Tensor key,
                            at::Tensor value, bool causal) {
    auto outputs = kept(ComputeAttention{query, key, value, causal});
    ctx->saved_data["causal"] = causal;
    ctx->save_for_backward({query, key, value, outputs[0], outputs[1]});
    return outputs[0];
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], 0.0,
        ctx->saved_data["causal"].toBool());
    return {query, key, value, at::Tensor()};
  }
};

// As autocast would: outside the Function, so that the casts are nodes of their own.
Tensors cast(Tensors inputs) {
  const auto device = inputs[0].device().type();
  if (!at::autocast::is_autocast_enabled(device)) return inputs;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (auto& input : inputs) {
    if (input.defined()) input = at::autocast::cached_cast(dtype, input, device);
  }
  return inputs;
}

// Autograd's Functions take an absent tensor as an empty optional only.
std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

bool fused_on_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  bool causal) {
  return query.device().is_cpu() && at::_fused_sdp_choice(query, key, value, {}, 0.0, causal) ==
                                        static_cast<std::int64_t>(at::SDPBackend::flash_attention);
}

}  // namespace

at::Tensor kept_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!keeping()) return at::linear(x, weight, bias);
  const auto inputs = cast({x, weight, bias});
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return KeptLinear::apply(inputs[0], inputs[1], given(inputs[2]));
}

at::Tensor kept_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          Mask mask) {
  const bool causal = mask == Mask::causal;
  if (keeping()) {
    const auto inputs = cast({query, key, value});
    if (fused_on_cpu(inputs[0], inputs[1], inputs[2], causal)) {
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      return KeptAttention::apply(inputs[0], inputs[1], inputs[2], causal);
    }
  }
  return at::scaled_dot_product_attention(query, key, value, {}, 0.0, causal);
}

}  // namespace poise::checkpointing
