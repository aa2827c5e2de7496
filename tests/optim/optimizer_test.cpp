// make_optimizer, and what apply() leaves alone: padding, the gradient, elements of other segments.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {
namespace {

config::OptimizerPolicy policy_of(const std::string& type) {
  config::OptimizerPolicy policy;
  policy.type = type;
  if (type == "sgd") policy.momentum = 0.9;
  return policy;
}

TEST(MakeOptimizer, KnowsItsNames) {
  for (const char* type : {"adamw", "adam", "lion", "sgd"}) {
    EXPECT_EQ(make_optimizer(policy_of(type))->name(), type);
  }
  EXPECT_EQ(make_optimizer(policy_of("adamw"))->num_moments(), 2);
  EXPECT_EQ(make_optimizer(policy_of("lion"))->num_moments(), 1);
  EXPECT_EQ(make_optimizer(policy_of("sgd"))->num_moments(), 1);
  config::OptimizerPolicy plain;
  plain.type = "sgd";
  EXPECT_EQ(make_optimizer(plain)->num_moments(), 0);
}

TEST(MakeOptimizer, RefusesWhatItCannotBe) {
  try {
    make_optimizer(policy_of("adamv"));
    FAIL() << "made an optimizer";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "[optim] unknown optimizer: 'adamv'; use one of: adamw, adam, adafactor, lamb, "
                 "lars, lion, sgd");
  }
  config::OptimizerPolicy nesterov;
  nesterov.type = "sgd";
  nesterov.nesterov = true;
  EXPECT_THROW(make_optimizer(nesterov), Error);
  config::OptimizerPolicy beta = policy_of("adam");
  beta.beta2 = 1;
  EXPECT_THROW(make_optimizer(beta), Error);
}

TEST(Apply, LeavesPaddingAndGradientAlone) {
  for (const char* type : {"adamw", "adam", "lion", "sgd"}) {
    const auto optimizer = make_optimizer(policy_of(type));
    Span span;
    span.master = at::zeros({600}, at::kFloat);
    span.low = at::zeros({600}, at::kBFloat16);
    span.gradient = at::full({600}, 3.0, at::kHalf);  // also in the padding: it must not matter
    for (int m = 0; m < optimizer->num_moments(); ++m)
      span.moments.push_back(at::zeros({600}, at::kFloat));
    span.segments = {{0, 100, 0}, {256, 256, 0}, {256, 300, 1}, {512, 513, 0}};
    const at::Tensor gradient = span.gradient.clone();
    const std::vector<GroupSettings> groups = {{0.1, 0.01}, {0.0, 0.0}};
    EXPECT_EQ(optimizer->rounds(), 0);
    optimizer->apply(span, groups, 1, 0.5);
    EXPECT_TRUE(at::equal(span.gradient, gradient));
    for (std::int64_t i = 0; i < 600; ++i) {
      const bool moves = i < 100 || i == 512;  // group 1 has a learning rate of 0
      const bool in_segment = moves || (i >= 256 && i < 300);
      EXPECT_EQ(span.master[i].item<float>() != 0, moves) << type << " " << i;
      EXPECT_EQ(span.low[i].item<float>(), span.master.to(at::kBFloat16)[i].item<float>());
      EXPECT_EQ(span.moments[0][i].item<float>() != 0, in_segment) << type << " " << i;
    }
  }
}

TEST(Apply, NamesABrokenSpan) {
  const auto optimizer = make_optimizer(policy_of("adamw"));
  Span span;
  span.master = at::zeros({8}, at::kFloat);
  span.gradient = at::zeros({7}, at::kFloat);
  span.moments = {at::zeros({8}, at::kFloat), at::zeros({8}, at::kFloat)};
  span.segments = {{0, 8, 0}};
  EXPECT_THROW(optimizer->apply(span, {{0.1, 0}}, 1, 1), Bug);
  span.gradient = at::zeros({8}, at::kFloat);
  EXPECT_THROW(optimizer->apply(span, {}, 1, 1), Bug);
  EXPECT_NO_THROW(optimizer->apply(span, {{0.1, 0}}, 1, 1));
}

}  // namespace
}  // namespace poise::optim
