// recompute(): the same bits as without, for every gradient; what it keeps; what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>

#include "checkpointing/replay.h"
#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

using Unit = std::function<at::Tensor(const at::Tensor&)>;
using Wrap = std::function<at::Tensor(const Unit&, const at::Tensor&)>;

at::Tensor parameter(at::IntArrayRef sizes) {
  return (at::randn(sizes) * 0.2).requires_grad_(true);
}

// x + dropout(linear(gelu(linear(x)))), counting its runs and when its second linear has run.
struct Block {
  at::Tensor up = parameter({32, 8}), up_bias = parameter({32}), down = parameter({8, 32});
  int runs = 0, finished = 0;

  at::Tensor operator()(const at::Tensor& x) {
    ++runs;
    auto y = at::dropout(at::linear(at::gelu(at::linear(x, up, up_bias)), down), 0.25, true);
    ++finished;
    return x + y;
  }
  Tensors parameters() const { return {up, up_bias, down}; }
};

struct Net {
  std::vector<Block> blocks = std::vector<Block>(4);
  at::Tensor input = at::randn({6, 8}).requires_grad_(true);
  Net() {
    for (auto& block : blocks)
      block = Block();  // vector(n) copies one block: give each its own weights
  }

  Tensors leaves() const {
    Tensors all{input};
    for (const auto& block : blocks) {
      for (const auto& p : block.parameters()) all.push_back(p);
    }
    return all;
  }
  Unit unit(int i) {
    return [this, i](const at::Tensor& x) { return blocks[i](x); };
  }
  Unit pair(int i, const Wrap& wrap) {
    return [this, i, wrap](const at::Tensor& x) { return wrap(unit(i + 1), wrap(unit(i), x)); };
  }
};

at::Tensor plain(const Unit& unit, const at::Tensor& x) { return unit(x); }
at::Tensor recomputed(const Unit& unit, const at::Tensor& x) { return recompute(unit, x); }

// Loss and all gradients of one pass from the same random state; the random state afterwards, too.
Tensors pass(Net& net, const Unit& forward) {
  at::manual_seed(3);
  const auto loss = forward(net.input).pow(2).sum();
  auto result = torch::autograd::grad({loss}, net.leaves());
  result.push_back(loss.detach());
  result.push_back(at::rand({4}));
  return result;
}

void expect_same_bits(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

Unit chain(Net& net, const Wrap& wrap) {
  return [&net, wrap](at::Tensor x) {
    for (int i = 0; i < 4; ++i) x = wrap(net.unit(i), x);
    return x;
  };
}

TEST(Recompute, GradientsHaveTheSameBitsWithDropout) {
  Net net;
  const auto expected = pass(net, chain(net, plain));
  expect_same_bits(pass(net, chain(net, recomputed)), expected);
  EXPECT_EQ(net.blocks[2].runs, 1 + 2);
}

TEST(Recompute, NestedTwoByTwoHasTheSameBits) {
  Net net;
  const auto expected = pass(net, chain(net, plain));
  const Unit nested = [&](const at::Tensor& x) {
    return recomputed(net.pair(2, recomputed), recomputed(net.pair(0, recomputed), x));
  };
  expect_same_bits(pass(net, nested), expected);
  const Unit whole = [&](const at::Tensor& x) { return recomputed(chain(net, recomputed), x); };
  expect_same_bits(pass(net, whole), expected);
}

TEST(Recompute, StopsWhenEverythingIsThere) {
  Net net;
  pass(net, chain(net, recomputed));
  // Dropout saves last, the addition nothing; `finished` comes after dropout.
  for (const auto& block : net.blocks) {
    EXPECT_EQ(block.runs, 2);
    EXPECT_EQ(block.finished, 1);
  }
}

TEST(Recompute, ReplaysAutocast) {
  Net net;
  auto with_autocast = [&](const Wrap& wrap) {
    return pass(net, [&, wrap](const at::Tensor& x) {
      AutocastScope outside(AutocastState::capture());
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      return chain(net, wrap)(x);
    });
  };
  const auto expected = with_autocast(plain);
  expect_same_bits(with_autocast(recomputed), expected);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Recompute, ClosureFormAndFrozenInput) {
  Net net;
  net.input = net.input.detach();
  at::manual_seed(1);
  const auto expected =
      torch::autograd::grad({net.blocks[0](net.input).sum()}, net.blocks[0].parameters());
  at::manual_seed(1);
  const auto y =
      recompute(std::function<Tensors()>([&] { return Tensors{net.blocks[0](net.input)}; }));
  expect_same_bits(torch::autograd::grad({y[0].sum()}, net.blocks[0].parameters()), expected);
}

TEST(Recompute, RetainedGraphRunsTwiceAndSeesChangedParameters) {
  auto x = at::randn({3, 4}).requires_grad_(true);
  auto scale = at::full({4}, 2.0);
  int runs = 0;
  const auto y = recompute(
      [&](const at::Tensor& in) {
        ++runs;
        return (in * scale).pow(2);
      },
      x);
  auto gradient = [&] {
    return torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
  };
  const auto first = gradient();
  expect_same_bits({gradient()}, {first});
  EXPECT_EQ(runs, 3);
  scale.fill_(3.0);
  EXPECT_FALSE(at::equal(gradient(), first));
}

TEST(Recompute, WithoutGradModeRunsOnceAndKeepsNothing) {
  Net net;
  at::NoGradGuard no_grad;
  EXPECT_FALSE(recompute(net.unit(0), net.input).requires_grad());
  EXPECT_EQ(net.blocks[0].runs, 1);
}

TEST(Recompute, BackwardInsideTheRegion) {
  auto x = at::randn({5}).requires_grad_(true);
  const Unit penalty = [](const at::Tensor& in) {
    auto inner = in.detach().requires_grad_(true);
    const auto slope = torch::autograd::grad({inner.pow(3).sum()}, {inner})[0];
    return in.pow(2) * slope;
  };
  const auto expected = torch::autograd::grad({penalty(x).sum()}, {x});
  expect_same_bits(torch::autograd::grad({recompute(penalty, x).sum()}, {x}), expected);
}

TEST(Recompute, SaysWhenItIsRecomputing) {
  std::vector<bool> seen;
  auto x = at::randn({3}).requires_grad_(true);
  const auto y = recompute(
      [&](const at::Tensor& in) {
        seen.push_back(recomputing());
        return in.pow(2);
      },
      x);
  torch::autograd::grad({y.sum()}, {x});
  EXPECT_EQ(seen, (std::vector<bool>{false, true}));
  EXPECT_FALSE(recomputing());
}

TEST(Recompute, LeavesBuffersAsTheyAre) {
  auto x = at::randn({3}).requires_grad_(true);
  auto calls = at::zeros({});
  const auto y = recompute(
      [&](const at::Tensor& in) {
        calls += 1;
        return in.pow(2);
      },
      x, {.buffers = {calls}});
  torch::autograd::grad({y.sum()}, {x});
  EXPECT_EQ(calls.item<double>(), 1);
}

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(Recompute, ExceptionKeepsItsTypeAndTheGraphStaysUsable) {
  auto x = at::randn({3}).requires_grad_(true);
  bool broken = false;
  const auto y = recompute(
      [&](const at::Tensor& in) {
        const auto squared = in.pow(2);
        if (broken) throw Broken("now");
        return squared.exp();
      },
      x);
  broken = true;
  EXPECT_THROW(torch::autograd::grad({y.sum()}, {x}, {}, true), Broken);
  broken = false;
  expect_same_bits(torch::autograd::grad({y.sum()}, {x}),
                   {2 * x.detach() * x.detach().pow(2).exp()});
  EXPECT_FALSE(recomputing());
}

TEST(Recompute, ThrowingFirstRunLeavesNoHooksBehind) {
  auto x = at::randn({3}).requires_grad_(true);
  const Unit broken = [](const at::Tensor& in) -> at::Tensor {
    in.pow(2);
    throw Broken("first");
  };
  EXPECT_THROW(recompute(broken, x), Broken);
  expect_same_bits(torch::autograd::grad({x.pow(2).sum()}, {x}), {2 * x.detach()});
}

std::string error_of(const at::Tensor& y, const at::Tensor& x) {
  try {
    torch::autograd::grad({y.sum()}, {x});
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Recompute, NamesWhatDiffers) {
  auto x = at::randn({4}).requires_grad_(true);
  bool second = false;
  auto region = [&](const std::function<at::Tensor(const at::Tensor&)>& then) {
    second = false;
    auto y = recompute(
        [&, then](const at::Tensor& in) { return second ? then(in) : in.exp().pow(2).sum(); }, x);
    second = true;
    return error_of(y, x);
  };
  EXPECT_THAT(region([](const at::Tensor& in) { return in.narrow(0, 0, 2).exp().pow(2).sum(); }),
              testing::HasSubstr("was Float [4] on cpu, is Float [2] on cpu"));
  EXPECT_THAT(region([](const at::Tensor& in) { return in.to(at::kDouble).exp().pow(2).sum(); }),
              testing::HasSubstr("is Double [4]"));
  EXPECT_THAT(region([](const at::Tensor& in) { return in.exp().sum(); }),
              testing::HasSubstr("recompute saved 1 tensors, forward at least 2"));
}

TEST(Recompute, InPlaceChangeOfAnInputIsLoud) {
  auto x = at::randn({4}).requires_grad_(true) * 1;
  const auto y = recompute([](const at::Tensor& in) { return in.exp(); }, x);
  at::NoGradGuard no_grad;
  x.add_(1);
  at::AutoGradMode grad(true);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Sequential, RunsFlaggedUnitsAgain) {
  Net net;
  const auto expected = pass(net, chain(net, plain));
  for (auto& block : net.blocks) block.runs = 0;
  const std::vector<Unit> units{net.unit(0), net.unit(1), net.unit(2), net.unit(3)};
  const auto actual = pass(net, [&](const at::Tensor& x) {
    return sequential(units, {true, false, false, true}, x);
  });
  expect_same_bits(actual, expected);
  EXPECT_EQ(net.blocks[0].runs, 2);
  EXPECT_EQ(net.blocks[1].runs, 1);
  EXPECT_EQ(net.blocks[3].runs, 2);
  EXPECT_THROW(sequential(units, {true}, net.input), Error);
}

// Backward frees as it goes: once the graph is gone nothing is held, and while it stands only
// inputs.
TEST(Recompute, HoldsInputsOnly) {
  auto x = at::randn({16}).requires_grad_(true);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made;
  auto alive = [&] {
    int count = 0;
    for (const auto& storage : made) count += storage.use_count() > 0;
    return count;
  };
  auto y = recompute(
      [&](const at::Tensor& in) {
        auto a = in.exp(), b = a.tanh(), c = b.sigmoid();
        for (const auto& t : {a, b, c}) made.emplace_back(t.storage().getWeakStorageImpl());
        return c.pow(2);
      },
      x);
  EXPECT_EQ(alive(), 0);
  y.sum().backward();
  EXPECT_EQ(made.size(), 6u);
  EXPECT_EQ(alive(), 0);
}

}  // namespace
}  // namespace poise::checkpointing
