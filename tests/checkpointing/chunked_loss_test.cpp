// chunked_cross_entropy() against cross_entropy_loss on whole logits: float64 to rounding, lower
// precisions at most twice torch's own error.
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>
#include <ATen/Context.h>
#include <ATen/core/Reduction.h>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "checkpointing/replay.h"
#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

struct Problem {
  at::Tensor hidden, weight, bias, targets;

  static Problem make(std::int64_t tokens = 37, std::int64_t width = 16,
                      std::int64_t classes = 29) {
    at::manual_seed(11);
    Problem p{at::randn({tokens, width}, at::kDouble), at::randn({classes, width}, at::kDouble),
              at::randn({classes}, at::kDouble), at::randint(classes, {tokens}, at::kLong)};
    p.targets.narrow(0, 3, 5).fill_(-100);
    return p;
  }
  Problem to(at::ScalarType dtype) const {
    auto leaf = [&](const at::Tensor& t) {
      return t.detach().to(dtype).clone().requires_grad_(true);
    };
    return {leaf(hidden), leaf(weight), leaf(bias), targets};
  }
};

struct Result {
  at::Tensor loss;
  Tensors gradients;  // hidden, weight, bias
};

Result differentiate(const Problem& p, const at::Tensor& loss) {
  return {loss.detach(), torch::autograd::grad({loss * 0.125}, {p.hidden, p.weight, p.bias})};
}

Result whole(const Problem& p) {
  const auto logits = at::linear(p.hidden, p.weight, p.bias);
  return differentiate(p, at::cross_entropy_loss(logits, p.targets, {}, at::Reduction::Sum));
}

Result chunked(const Problem& p, std::int64_t chunk_tokens = 8) {
  return differentiate(
      p, chunked_cross_entropy(p.hidden, p.weight, p.bias, p.targets, chunk_tokens).loss_sum);
}

double error_against(const at::Tensor& value, const at::Tensor& exact) {
  return (value.to(at::kDouble) - exact).norm().item<double>() / exact.norm().item<double>();
}

TEST(ChunkedLoss, EqualsWholeLogitsInDouble) {
  const auto p = Problem::make().to(at::kDouble);
  const auto expected = whole(p);
  for (const std::int64_t chunk : {1, 8, 36, 37, 1000}) {
    const auto actual = chunked(p, chunk);
    EXPECT_EQ(actual.loss.scalar_type(), at::kDouble);
    EXPECT_LT(error_against(actual.loss, expected.loss), 1e-14) << chunk;
    for (int i = 0; i < 3; ++i)
      EXPECT_LT(error_against(actual.gradients[i], expected.gradients[i]), 1e-13);
  }
}

// The directional derivative by central differences, along a random direction of all inputs at
// once.
TEST(ChunkedLoss, GradientAgreesWithDifferences) {
  const auto p = Problem::make().to(at::kDouble);
  const auto gradients = chunked(p).gradients;
  const Tensors along{at::randn_like(p.hidden), at::randn_like(p.weight), at::randn_like(p.bias)};
  auto value = [&](double step) {
    at::NoGradGuard no_grad;
    return chunked_cross_entropy(p.hidden + step * along[0], p.weight + step * along[1],
                                 p.bias + step * along[2], p.targets, 8)
               .loss_sum.item<double>() *
           0.125;
  };
  double slope = 0;
  for (int i = 0; i < 3; ++i) slope += (gradients[i] * along[i]).sum().item<double>();
  EXPECT_NEAR((value(1e-5) - value(-1e-5)) / 2e-5, slope, 1e-6 * std::abs(slope));
}

void expect_at_most_twice_torchs_error(const Result& actual, const Result& torchs,
                                       const Result& exact) {
  const double floor = 1e-7;  // both may be exact to the last bit of the sum
  EXPECT_LE(error_against(actual.loss, exact.loss),
            2 * error_against(torchs.loss, exact.loss) + floor);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(actual.gradients[i].scalar_type(), torchs.gradients[i].scalar_type());
    EXPECT_LE(error_against(actual.gradients[i], exact.gradients[i]),
              2 * error_against(torchs.gradients[i], exact.gradients[i]))
        << i;
  }
}

TEST(ChunkedLoss, ErrorInLowerPrecisionIsAtMostTwiceTorchs) {
  const auto exact = Problem::make(150, 32, 64);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto p = exact.to(dtype);
    // Exact is what the rounded inputs give in float64.
    const auto reference = whole(Problem{p.hidden, p.weight, p.bias, p.targets}.to(at::kDouble));
    const auto actual = chunked(p, 32);
    EXPECT_EQ(actual.loss.scalar_type(), at::kFloat);
    expect_at_most_twice_torchs_error(actual, whole(p), reference);
  }
}

TEST(ChunkedLoss, RunsUnderAutocastInItsDtype) {
  const auto p = Problem::make(150, 32, 64).to(at::kFloat);
  const auto reference = whole(p.to(at::kDouble));
  Result actual, torchs;
  {
    AutocastScope scope(AutocastState::capture());
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const auto logits = at::linear(p.hidden, p.weight, p.bias);
    torchs.loss = at::cross_entropy_loss(logits, p.targets, {}, at::Reduction::Sum);
    actual.loss = chunked_cross_entropy(p.hidden, p.weight, p.bias, p.targets, 32).loss_sum;
  }
  torchs = differentiate(p, torchs.loss);
  actual = differentiate(p, actual.loss);
  EXPECT_EQ(actual.loss.scalar_type(), at::kFloat);
  EXPECT_GT(error_against(actual.loss, reference.loss), 1e-6);  // it did compute in bf16
  expect_at_most_twice_torchs_error(actual, torchs, reference);
}

TEST(ChunkedLoss, CountsAndIgnores) {
  auto p = Problem::make().to(at::kFloat);
  EXPECT_EQ(
      chunked_cross_entropy(p.hidden, p.weight, p.bias, p.targets, 8).counted.item<std::int64_t>(),
      32);
  p.targets = at::full({37}, 7, at::kLong);
  const auto all_ignored = chunked_cross_entropy(p.hidden, p.weight, p.bias, p.targets, 8, 7);
  EXPECT_EQ(all_ignored.counted.item<std::int64_t>(), 0);
  const auto result = differentiate(p, all_ignored.loss_sum);
  EXPECT_EQ(result.loss.item<float>(), 0);
  for (const auto& gradient : result.gradients) EXPECT_EQ(gradient.abs().max().item<float>(), 0);
}

TEST(ChunkedLoss, IgnoredRowsMayHoldAnything) {
  auto p = Problem::make().to(at::kFloat);
  const auto expected = chunked(p);
  {
    at::NoGradGuard no_grad;
    p.hidden.narrow(0, 3, 5).fill_(1e30);
  }
  const auto actual = chunked(p);
  EXPECT_TRUE(at::equal(actual.loss, expected.loss));
  EXPECT_EQ(actual.gradients[0].narrow(0, 3, 5).abs().max().item<float>(), 0);
}

TEST(ChunkedLoss, FrozenInputsGetNoGradientAndCostNone) {
  const auto p = Problem::make().to(at::kFloat);
  const auto expected = chunked(p).gradients;
  auto loss = [&](const at::Tensor& h, const at::Tensor& w, const at::Tensor& b) {
    return chunked_cross_entropy(h, w, b, p.targets, 8).loss_sum * 0.125;
  };
  const auto h = p.hidden.detach(), w = p.weight.detach();
  EXPECT_TRUE(at::equal(torch::autograd::grad({loss(p.hidden, w, p.bias.detach())}, {p.hidden})[0],
                        expected[0]));
  EXPECT_TRUE(at::equal(torch::autograd::grad({loss(h, p.weight, p.bias.detach())}, {p.weight})[0],
                        expected[1]));
  EXPECT_TRUE(at::equal(torch::autograd::grad({loss(h, w, p.bias)}, {p.bias})[0], expected[2]));
  EXPECT_FALSE(loss(h, w, at::Tensor()).requires_grad());
  const auto none =
      torch::autograd::grad({loss(p.hidden, p.weight, at::Tensor())}, {p.hidden, p.weight});
  EXPECT_FALSE(at::equal(none[1], expected[1]));
}

TEST(ChunkedLoss, SameBitsTwiceAndInsideARegion) {
  const auto p = Problem::make().to(at::kFloat);
  const auto once = chunked(p), again = chunked(p);
  const auto loss = recompute(
      [&](const at::Tensor& h) {
        return chunked_cross_entropy(h, p.weight, p.bias, p.targets, 8).loss_sum;
      },
      p.hidden);
  const auto inside = differentiate(p, loss);
  EXPECT_TRUE(at::equal(once.loss, again.loss));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(once.gradients[i], again.gradients[i]));
    EXPECT_TRUE(at::equal(once.gradients[i], inside.gradients[i]));
  }
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(ChunkedLoss, RefusesBadInput) {
  const auto p = Problem::make().to(at::kFloat);
  auto call = [&](const at::Tensor& targets, const at::Tensor& weight, std::int64_t chunk) {
    return error_of([&] { chunked_cross_entropy(p.hidden, weight, p.bias, targets, chunk); });
  };
  EXPECT_NE(call(at::full({37}, 29, at::kLong), p.weight, 8).find("target 29, classes are 0 to 28"),
            std::string::npos);
  EXPECT_NE(call(at::full({37}, -1, at::kLong), p.weight, 8).find("target -1"), std::string::npos);
  EXPECT_NE(call(p.targets, p.weight, 0).find("chunk_tokens = 0"), std::string::npos);
  EXPECT_NE(call(p.targets.narrow(0, 0, 5), p.weight, 8).find("targets [5]"), std::string::npos);
  EXPECT_NE(call(p.targets.to(at::kInt), p.weight, 8).find("int64 targets"), std::string::npos);
  EXPECT_NE(call(p.targets, p.weight.to(at::kDouble), 8).find("cast one of them"),
            std::string::npos);
  const auto loss = chunked_cross_entropy(p.hidden, p.weight, p.bias, p.targets, 8).loss_sum;
  EXPECT_NE(error_of([&] {
              torch::autograd::grad({loss}, {p.hidden}, {}, true, true);
            }).find("second derivative"),
            std::string::npos);
}

}  // namespace
}  // namespace poise::checkpointing
