// Projection and cross-entropy by chunks of rows. Forward keeps the inputs only; backward makes
// each chunk's logits again, turns them into their gradient in place and adds it up.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kRoom = "checkpointing";

// Everything that both passes read. Casts are made here, by hand: autocast is off inside.
struct Head {
  at::Tensor hidden;   // [tokens, width], its own dtype
  at::Tensor weight;   // [classes, width], dtype of the logits
  at::Tensor bias;     // [classes] or undefined, dtype of the logits
  at::Tensor targets;  // [tokens]
  std::int64_t chunk_tokens;
  std::int64_t ignore_index;

  at::ScalarType sum_dtype() const {
    return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
};

// One chunk's rows.
struct Chunk {
  at::Tensor hidden;   // [rows, width], dtype of the logits
  at::Tensor targets;  // [rows, 1], 0 where ignored
  at::Tensor ignored;  // [rows, 1]
  std::int64_t start;
  std::int64_t rows;

  Chunk(const Head& head, std::int64_t first) : start(first) {
    rows = std::min(head.chunk_tokens, head.hidden.size(0) - start);
    hidden = head.hidden.narrow(0, start, rows).to(head.weight.scalar_type());
    const auto column = head.targets.narrow(0, start, rows).unsqueeze(1);
    ignored = column.eq(head.ignore_index);
    targets = column.masked_fill(ignored, 0);
  }

  // Logits in the dtype of the sums, ours to overwrite.
  at::Tensor logits(const Head& head) const {
    const auto product = head.bias.defined() ? at::addmm(head.bias, hidden, head.weight.t())
                                             : at::mm(hidden, head.weight.t());
    return product.to(head.sum_dtype());
  }
};

template <class Body>
void for_each_chunk(const Head& head, const Body& body) {
  for (std::int64_t start = 0; start < head.hidden.size(0); start += head.chunk_tokens) {
    body(Chunk(head, start));
  }
}

// Sum over the counted rows. Chunks are added in fp64, so that their number hardly shows.
at::Tensor sum_of_losses(const Head& head) {
  auto total = at::zeros({}, head.hidden.options().dtype(at::kDouble));
  for_each_chunk(head, [&](const Chunk& chunk) {
    const auto logits = chunk.logits(head);
    const auto losses =
        at::logsumexp(logits, 1, /*keepdim=*/true) - logits.gather(1, chunk.targets);
    total += losses.masked_fill(chunk.ignored, 0).sum(at::kDouble);
  });
  return total.to(head.sum_dtype());
}

// d loss / d logits of one chunk, in the dtype of the logits.
at::Tensor logits_gradient(const Head& head, const Chunk& chunk, const at::Tensor& grad_sum) {
  auto gradient = at::softmax(chunk.logits(head), 1);
  gradient.scatter_add_(1, chunk.targets,
                        at::scalar_tensor(-1, gradient.options()).expand({chunk.rows, 1}));
  // Filled, not multiplied: an ignored row may hold anything.
  gradient.masked_fill_(chunk.ignored, 0);
  return gradient.mul_(grad_sum).to(head.weight.scalar_type());
}

// total += a @ b, in the dtype of `total`.
void add_product(at::Tensor& total, const at::Tensor& a, const at::Tensor& b) {
  if (total.scalar_type() == a.scalar_type()) {
    total.addmm_(a, b);
  } else {
    total += at::mm(a, b);
  }
}

struct Wanted {
  bool hidden, weight, bias;
};

struct Gradients {
  at::Tensor hidden, weight,
      bias;  // undefined where not wanted; weight and bias in the dtype of the sums
};

Gradients gradients(const Head& head, const at::Tensor& grad_sum, Wanted wanted) {
  const auto sums = head.weight.options().dtype(head.sum_dtype());
  Gradients result;
  if (wanted.hidden) result.hidden = at::empty_like(head.hidden, at::MemoryFormat::Contiguous);
  if (wanted.weight) result.weight = at::zeros(head.weight.sizes(), sums);
  if (wanted.bias) result.bias = at::zeros({head.weight.size(0)}, sums);
  for_each_chunk(head, [&](const Chunk& chunk) {
    const auto gradient = logits_gradient(head, chunk, grad_sum);
    if (wanted.hidden)
      result.hidden.narrow(0, chunk.start, chunk.rows).copy_(gradient.mm(head.weight));
    if (wanted.weight) add_product(result.weight, gradient.t(), chunk.hidden);
    if (wanted.bias) result.bias += gradient.sum(0, false, head.sum_dtype());
  });
  return result;
}

at::Tensor cast_back(const at::Tensor& gradient, const at::Tensor& like) {
  return gradient.defined() ? gradient.to(like.scalar_type()) : gradient;
}

class ChunkedCrossEntropy : public Function<ChunkedCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, at::Tensor hidden, at::Tensor weight,
                            std::optional<at::Tensor> optional_bias, at::Tensor targets,
                            at::ScalarType logits_dtype, std::int64_t chunk_tokens,
                            std::int64_t ignore_index) {
    const auto bias = optional_bias.value_or(at::Tensor());
    ctx->save_for_backward({hidden, weight, bias, targets});
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(logits_dtype);
    ctx->saved_data["chunk_tokens"] = chunk_tokens;
    ctx->saved_data["ignore_index"] = ignore_index;
    return sum_of_losses(head(ctx, {hidden, weight, bias, targets}));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (at::GradMode::is_enabled()) {
      fail(kRoom,
           "chunked_cross_entropy was asked for a second derivative, which it does not have; "
           "use whole logits there, or drop create_graph");
    }
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const Wanted wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                        saved[2].defined() && ctx->needs_input_grad(2)};
    const auto result = gradients(head(ctx, saved), grads[0], wanted);
    variable_list all(7);
    all[0] = result.hidden;
    all[1] = cast_back(result.weight, saved[1]);
    all[2] = cast_back(result.bias, saved[2]);
    return all;
  }

 private:
  static Head head(AutogradContext* ctx, const variable_list& saved) {
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {.hidden = saved[0],
            .weight = saved[1].to(dtype),
            .bias = saved[2].defined() ? saved[2].to(dtype) : saved[2],
            .targets = saved[3],
            .chunk_tokens = ctx->saved_data["chunk_tokens"].toInt(),
            .ignore_index = ctx->saved_data["ignore_index"].toInt()};
  }
};

void check_shapes(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                  const at::Tensor& targets) {
  const bool matrices = hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1);
  const bool rows = matrices && targets.dim() == 1 && targets.size(0) == hidden.size(0);
  const bool biased =
      !bias.defined() || (bias.dim() == 1 && matrices && bias.size(0) == weight.size(0));
  if (!rows || !biased) {
    fail(kRoom, "chunked_cross_entropy got hidden ", hidden.sizes(), ", weight ", weight.sizes(),
         ", bias ", bias.defined() ? join(bias.sizes()) : "none", ", targets ", targets.sizes(),
         "; give [tokens, width], [classes, width], [classes] or none, [tokens]");
  }
  if (targets.scalar_type() != at::kLong || !hidden.is_floating_point() ||
      !weight.is_floating_point()) {
    fail(kRoom, "chunked_cross_entropy got hidden ", hidden.scalar_type(), ", weight ",
         weight.scalar_type(), ", targets ", targets.scalar_type(),
         "; give floating hidden and weight and int64 targets");
  }
}

// On a GPU this would be a host sync; there the kernel's own device assertion stops the run.
void check_targets(const at::Tensor& targets, std::int64_t classes, std::int64_t ignore_index) {
  if (!targets.device().is_cpu()) return;
  const auto bad = (targets.lt(0) | targets.ge(classes)) & targets.ne(ignore_index);
  if (!bad.any().item<bool>()) return;
  const auto value = targets.masked_select(bad)[0].item<std::int64_t>();
  fail(kRoom, "chunked_cross_entropy got target ", value, ", classes are 0 to ", classes - 1,
       "; correct the labels, or set ignore_index (now ", ignore_index, ") for rows not to count");
}

at::ScalarType dtype_of_logits(const at::Tensor& hidden, const at::Tensor& weight) {
  const auto device = hidden.device().type();
  const bool autocast =
      at::autocast::is_autocast_enabled(device) && hidden.scalar_type() != at::kDouble;
  if (autocast) return at::autocast::get_autocast_dtype(device);
  if (hidden.scalar_type() != weight.scalar_type()) {
    fail(kRoom, "chunked_cross_entropy got hidden ", hidden.scalar_type(), " and weight ",
         weight.scalar_type(), "; cast one of them, or use autocast");
  }
  return weight.scalar_type();
}

}  // namespace

LossSum chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                              const at::Tensor& bias, const at::Tensor& targets,
                              std::int64_t chunk_tokens, std::int64_t ignore_index) {
  check_shapes(hidden, weight, bias, targets);
  if (chunk_tokens < 1) fail(kRoom, "chunk_tokens = ", chunk_tokens, "; give at least 1");
  check_targets(targets, weight.size(0), ignore_index);
  const auto dtype = dtype_of_logits(hidden, weight);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  auto loss_sum = ChunkedCrossEntropy::apply(hidden, weight, optional_bias, targets, dtype,
                                             chunk_tokens, ignore_index);
  return {loss_sum, targets.ne(ignore_index).sum()};
}

}  // namespace poise::checkpointing
