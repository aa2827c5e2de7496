// Saved tensors that wait in a store: same gradients, one copy of each, parameters and small ones
// stay, and a tensor that was changed in place is an error.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/real.h>
#include <gtest/gtest.h>

#include "poise/checkpointing.h"
#include "poise/memory.h"
#include "support/temp_folder.h"
#include "support/tiny_model.h"

namespace poise::checkpointing {
namespace {

using test::normal;

struct Setting {
  std::shared_ptr<offload::HostMemory> memory =
      std::make_shared<offload::HostMemory>(c10::Device(c10::kCPU), 0);
  std::shared_ptr<offload::Store> store = offload::host_store(memory, c10::Device(c10::kCPU));
};

constexpr std::int64_t kRows = 64, kWidth = 32;
constexpr std::int64_t kBytes = kRows * kWidth * 4;

struct Net {
  at::Tensor w1 = normal({kWidth, kWidth}, 1, 0.3).requires_grad_();
  at::Tensor w2 = normal({kWidth, kWidth}, 2, 0.3).requires_grad_();
  at::Tensor x = normal({kRows, kWidth}, 3).requires_grad_();

  Tensors forward(const Tensors& in) const {
    const auto h = at::gelu(at::linear(in[0], w1));
    return {(at::linear(h, w2) * h).t().contiguous().t() * in[0]};
  }
  Tensors gradients(const at::Tensor& out, bool retain = false) const {
    return torch::autograd::grad({out}, {x, w1, w2}, {at::ones_like(out)}, retain);
  }
};

void expect_equal(const Tensors& a, const Tensors& b) {
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(ActivationOffload, GivesTheSameGradients) {
  const Net net;
  const auto expected = net.gradients(net.forward({net.x})[0]);
  testing::TempFolder folder;
  config::OffloadPolicy policy;
  policy.directory = folder.path();
  policy.block_bytes = 4096;
  const Setting host;
  for (const auto& store : {host.store, offload::file_store(policy, host.memory)}) {
    const ActivationOffload offload(store, 1, {net.w1, net.w2});
    Stream::set_test_delay(4, 300);
    const auto out = offload([&](const Tensors& in) { return net.forward(in); }, {net.x});
    expect_equal(net.gradients(out[0], /*retain=*/true), expected);
    expect_equal(net.gradients(out[0]), expected);  // a second time through the same graph
    Stream::set_test_delay(0, 0);
  }
}

// Conjugates and negatives that torch reads through a bit of the tensor, over the memory of
// another.
TEST(ActivationOffload, GivesTheSameGradientsOfComplexNumbers) {
  const auto x = normal({kRows, kWidth}, 3).requires_grad_();
  const auto w = normal({kRows, kWidth}, 4).requires_grad_();
  const auto forward = [&] {
    const auto z = at::complex(x, w), y = z * z;
    const auto turned = y.conj();
    const auto sign = at::_neg_view(x * w);
    return at::real(turned * y * turned).sum() + (sign * sign * (x * w)).sum();
  };
  const auto expected = torch::autograd::grad({forward()}, {x, w});
  testing::TempFolder folder;
  config::OffloadPolicy policy;
  policy.directory = folder.path();
  policy.block_bytes = 4096;
  const Setting host;
  for (const auto& store : {host.store, offload::file_store(policy, host.memory)}) {
    const ActivationOffload offload(store, 1, {});
    at::Tensor out;
    {
      const auto scope = offload.scope();
      out = forward();
    }
    expect_equal(torch::autograd::grad({out}, {x, w}), expected);
  }
}

TEST(ActivationOffload, KeepsOneCopyOfEachAndNoneOfParameters) {
  const Net net;
  const Setting setting;
  const ActivationOffload offload(setting.store, 1, {net.w1, net.w2});
  {
    const auto scope = offload.scope();
    const auto y = net.x * 2;  // saves nothing of size
    const auto out = at::linear(y, net.w1) + at::linear(y, net.w2);
    EXPECT_EQ(setting.memory->bytes(), kBytes) << "y, saved twice; no weights";
    net.gradients(out);
  }
  const ActivationOffload large_only(setting.store, kBytes + 1, {});
  const auto before = setting.memory->bytes();
  const auto scope = large_only.scope();
  const auto out = at::gelu(net.x);
  EXPECT_EQ(setting.memory->bytes(), before) << "below the least size";
}

TEST(ActivationOffload, TheDeviceIsFreeOfWhatWasSaved) {
  memory::Ledger ledger;
  const memory::AccountScope account(ledger, memory::Account::activations);
  const Setting setting;
  const ActivationOffload offload(setting.store, 1, {});
  const auto x = normal({kRows, kWidth}, 3).requires_grad_();
  const auto depth = 20;
  const auto held = [&](bool offloaded) {
    const auto scope = offloaded ? offload.scope() : nullptr;
    auto y = x * 1;
    for (int i = 0; i < depth; ++i) y = at::gelu(y);
    const auto bytes = ledger.snapshot().current_bytes;
    ledger.reset_peak();
    torch::autograd::grad({y}, {x}, {at::ones_like(y)});
    const auto peak = ledger.snapshot().peak_bytes;
    return std::pair(bytes, peak);
  };
  const auto [kept, kept_peak] = held(false);
  const auto [left, left_peak] = held(true);
  EXPECT_GE(kept, depth * kBytes);
  EXPECT_LE(left, 5 * kBytes) << "x, the result, and what is on its way out";
  EXPECT_LE(left_peak, 10 * kBytes) << "five of backward, two on their way out, three back";
  EXPECT_LT(left_peak, kept_peak / 2);
}

TEST(ActivationOffload, ATensorChangedInPlaceIsAnError) {
  const Net net;
  const Setting setting;
  const ActivationOffload offload(setting.store, 1, {});
  at::Tensor out, y;
  {
    const auto scope = offload.scope();
    y = net.x * 2;
    out = y * y;
  }
  {
    const at::NoGradGuard no_grad;
    y.add_(1);
  }
  const auto message = testing::message_of([&] { out.sum().backward(); });
  EXPECT_NE(message.find("[checkpointing] a tensor that backward needs was changed in place"),
            std::string::npos)
      << message;
}

TEST(ActivationOffload, NestsWithRecompute) {
  const Net net;
  const auto expected = net.gradients(net.forward({net.x})[0]);
  const Setting setting;
  const ActivationOffload offload(setting.store, 1, {net.w1, net.w2});
  const auto run = [&](const Tensors& in) { return net.forward(in); };
  const auto outside = offload([&](const Tensors& in) { return recompute(run, in); }, {net.x * 1});
  const auto inside = recompute([&](const Tensors& in) { return offload(run, in); }, {net.x});
  expect_equal(net.gradients(outside[0]), expected);
  expect_equal(net.gradients(inside[0]), expected);
}

TEST(ActivationOffload, SpansAreUsedAgain) {
  const Net net;
  const Setting setting;
  const ActivationOffload offload(setting.store, 1, {net.w1, net.w2});
  std::int64_t first = 0;
  for (int i = 0; i < 20; ++i) {
    const auto out = offload([&](const Tensors& in) { return net.forward(in); }, {net.x});
    net.gradients(out[0]);
    if (i == 0) first = setting.memory->bytes();
  }
  EXPECT_EQ(setting.memory->bytes(), first);
}

TEST(ActivationOffload, NothingOutlivesItsGraph) {
  const Net net;
  Setting setting;
  Tensors out;
  {
    const ActivationOffload offload(setting.store, 1, {});
    out = offload([&](const Tensors& in) { return net.forward(in); }, {net.x});
  }
  const std::weak_ptr<offload::Store> store = setting.store;
  setting.store.reset();
  net.gradients(out[0]);  // the graph has all it needs
  out.clear();
  EXPECT_EQ(setting.memory->bytes(), 0);
  EXPECT_TRUE(store.expired());
}

}  // namespace
}  // namespace poise::checkpointing
