#include <ATen/autocast_mode.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <thread>

#include "poise/precision.h"

namespace poise::precision {
namespace {

namespace autocast = at::autocast;
using config::DType;

TEST(AutocastDtype, FollowsThePolicy) {
  config::PrecisionPolicy policy;
  EXPECT_EQ(autocast_dtype(policy), std::nullopt);
  policy.dtype = DType::bf16;
  EXPECT_EQ(autocast_dtype(policy), at::kBFloat16);
  policy.dtype = DType::fp16;
  EXPECT_EQ(autocast_dtype(policy), at::kHalf);
  policy.autocast = false;
  EXPECT_EQ(autocast_dtype(policy), std::nullopt);
}

TEST(ScalarType, MapsEachDtype) {
  EXPECT_EQ(scalar_type(DType::fp32), at::kFloat);
  EXPECT_EQ(scalar_type(DType::bf16), at::kBFloat16);
  EXPECT_EQ(scalar_type(DType::fp16), at::kHalf);
}

TEST(AutocastGuard, CastsMatmulAndRestoresEverything) {
  autocast::set_autocast_enabled(at::kCPU, false);
  autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  autocast::set_autocast_cache_enabled(true);
  const at::Tensor a = at::ones({2, 2});
  {
    AutocastGuard guard(at::kCPU, at::kBFloat16);
    EXPECT_TRUE(autocast::is_autocast_enabled(at::kCPU));
    EXPECT_FALSE(autocast::is_autocast_cache_enabled());
    EXPECT_EQ(at::matmul(a, a).scalar_type(), at::kBFloat16);
    {
      AutocastGuard inner(at::kCPU, at::kHalf);
      EXPECT_EQ(at::matmul(a, a).scalar_type(), at::kHalf);
    }
    EXPECT_EQ(at::matmul(a, a).scalar_type(), at::kBFloat16);
    EXPECT_FALSE(autocast::is_autocast_cache_enabled());
  }
  EXPECT_FALSE(autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(autocast::is_autocast_cache_enabled());
  EXPECT_EQ(autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  EXPECT_EQ(at::matmul(a, a).scalar_type(), at::kFloat);
}

TEST(AutocastGuard, WithoutADtypeLeavesTheUsersAutocastOn) {
  AutocastGuard users(at::kCPU, at::kBFloat16);
  autocast::set_autocast_cache_enabled(true);
  {
    AutocastGuard guard(at::kCPU, std::nullopt);
    EXPECT_TRUE(autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(autocast::is_autocast_cache_enabled());
  }
  EXPECT_TRUE(autocast::is_autocast_enabled(at::kCPU));
}

TEST(AutocastGuard, SeesAWeightRewrittenBehindTorchsBack) {
  at::Tensor weight = at::ones({2, 2}).set_requires_grad(true);
  const at::Tensor x = at::ones({1, 2});
  AutocastGuard guard(at::kCPU, at::kBFloat16);
  EXPECT_EQ(at::matmul(x, weight).sum().item<float>(), 4.0f);
  weight.detach().fill_(3);  // the weight cache would still hand out the copy made above
  EXPECT_EQ(at::matmul(x, weight).sum().item<float>(), 12.0f);
}

TEST(AutocastGuard, IsThisThreadsOnly) {
  AutocastGuard guard(at::kCPU, at::kBFloat16);
  bool other = true;
  std::thread([&] { other = autocast::is_autocast_enabled(at::kCPU); }).join();
  EXPECT_FALSE(other);
}

}  // namespace
}  // namespace poise::precision
