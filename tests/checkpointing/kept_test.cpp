// Selective recompute: kept_linear() and kept_attention() give torch's bits everywhere, and in a
// region that keeps them they run once.
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include "checkpointing/replay.h"
#include "poise/checkpointing.h"

namespace poise::checkpointing {
namespace {

using Unit = std::function<at::Tensor(const at::Tensor&)>;

// Attention over 2 heads of 8, then a linear back and dropout.
struct Attention {
  at::Tensor qkv = (at::randn({48, 16}) * 0.3).requires_grad_(true);
  at::Tensor bias = (at::randn({48}) * 0.3).requires_grad_(true);
  at::Tensor out = (at::randn({16, 16}) * 0.3).requires_grad_(true);
  at::Tensor input = at::randn({2, 5, 16}).requires_grad_(true);
  bool kept = false;

  at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const {
    return kept ? kept_linear(x, w, b) : at::linear(x, w, b);
  }
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    return kept ? kept_attention(q, k, v, Mask::causal)
                : at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
  }
  at::Tensor operator()(const at::Tensor& x) const {
    const auto parts =
        linear(x, qkv, bias).view({2, 5, 3, 2, 8}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = attend(parts[0], parts[1], parts[2]).transpose(1, 2).reshape({2, 5, 16});
    return at::dropout(linear(at::gelu(mixed), out, {}), 0.25, true);
  }
  Tensors leaves() const { return {input, qkv, bias, out}; }
};

// How often the named operator ran on this thread meanwhile.
thread_local int calls = 0;
class CallCounter {
 public:
  explicit CallCounter(const char* name) {
    wanted() = name;
    calls = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&count).scopes({at::RecordScope::FUNCTION}));
  }
  ~CallCounter() { at::removeCallback(handle_); }

 private:
  static std::string& wanted() {
    static std::string name;
    return name;
  }
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& function) {
    if (wanted() == function.name()) ++calls;
    return nullptr;
  }
  at::CallbackHandle handle_;
};

Tensors gradients(const Attention& block, const Unit& forward) {
  at::manual_seed(5);
  return torch::autograd::grad({forward(block.input).pow(2).sum()}, block.leaves());
}

void expect_same_bits(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

TEST(Kept, SameBitsAsTorchInsideAndOutside) {
  at::manual_seed(1);
  Attention block;
  const auto expected = gradients(block, block);
  block.kept = true;
  expect_same_bits(gradients(block, block), expected);
  for (const auto keep : {Options::Keep::nothing, Options::Keep::marked}) {
    expect_same_bits(
        gradients(block, [&](const at::Tensor& x) { return recompute(block, x, {.keep = keep}); }),
        expected);
  }
}

TEST(Kept, SameBitsUnderAutocast) {
  at::manual_seed(1);
  Attention block;
  auto run = [&](bool keep) {
    return gradients(block, [&](const at::Tensor& x) {
      AutocastScope scope(AutocastState::capture());
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      if (!keep) return block(x);
      return recompute(block, x, {.keep = Options::Keep::marked});
    });
  };
  const auto expected = run(false);
  block.kept = true;
  expect_same_bits(run(true), expected);
}

TEST(Kept, MarkedOperationsRunOnceAndAgainOtherwise) {
  at::manual_seed(1);
  Attention block;
  block.kept = true;
  auto count = [&](const char* name, Options::Keep keep) {
    CallCounter counter(name);
    auto y = recompute(block, block.input, {.keep = keep});
    y.sum().backward();
    return calls;
  };
  const auto* attention = "aten::_scaled_dot_product_flash_attention_for_cpu";
  EXPECT_EQ(count("aten::linear", Options::Keep::marked), 2);
  EXPECT_EQ(count("aten::linear", Options::Keep::nothing), 4);
  EXPECT_EQ(count(attention, Options::Keep::marked), 1);
  EXPECT_EQ(count(attention, Options::Keep::nothing), 2);
  EXPECT_EQ(count("aten::gelu", Options::Keep::marked), 2);
}

}  // namespace
}  // namespace poise::checkpointing
