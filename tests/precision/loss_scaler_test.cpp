#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "poise/error.h"
#include "poise/precision.h"

namespace poise::precision {
namespace {

config::PrecisionPolicy fp16() {
  config::PrecisionPolicy policy;
  policy.dtype = config::DType::fp16;
  policy.initial_loss_scale = 1024;
  policy.loss_scale_growth_interval = 3;
  return policy;
}

// Scales after each window; 'o' is an overflow, '.' a clean update.
std::vector<double> scales(LossScaler& scaler, const std::string& windows) {
  std::vector<double> result;
  for (char window : windows) {
    scaler.update(window == 'o');
    result.push_back(scaler.scale());
  }
  return result;
}
using Scales = std::vector<double>;

TEST(LossScaler, GrowsAtTheExactUpdate) {
  LossScaler scaler(fp16());
  EXPECT_EQ(scales(scaler, "......."), (Scales{1024, 1024, 2048, 2048, 2048, 4096, 4096}));
  EXPECT_EQ(scaler.state().clean_updates, 1);
}

TEST(LossScaler, AnOverflowShrinksAndStartsTheCountAnew) {
  LossScaler scaler(fp16());
  EXPECT_EQ(scales(scaler, "..o..."), (Scales{1024, 1024, 512, 512, 512, 1024}));
}

TEST(LossScaler, HysteresisSparesLoneOverflows) {
  auto policy = fp16();
  policy.loss_scale_hysteresis = 2;
  LossScaler scaler(policy);
  // Lone overflows never shrink; the second in a row does, and so does each one after it.
  EXPECT_EQ(scales(scaler, "o.o.ooo.o"),
            (Scales{1024, 1024, 1024, 1024, 1024, 512, 256, 256, 256}));
}

TEST(LossScaler, AForgivenOverflowStillDelaysGrowth) {
  auto policy = fp16();
  policy.loss_scale_hysteresis = 2;
  LossScaler scaler(policy);
  EXPECT_EQ(scales(scaler, "..o..."), (Scales{1024, 1024, 1024, 1024, 1024, 2048}));
}

TEST(LossScaler, StopsAtFloorAndSaysSo) {
  auto policy = fp16();
  policy.min_loss_scale = 300;
  LossScaler scaler(policy);
  EXPECT_FALSE(scaler.update(true));
  EXPECT_EQ(scaler.scale(), 512);
  EXPECT_FALSE(scaler.update(true));
  EXPECT_EQ(scaler.scale(), 300);
  EXPECT_TRUE(scaler.update(true));
  EXPECT_EQ(scaler.scale(), 300);
  EXPECT_FALSE(scaler.update(false));
}

TEST(LossScaler, StopsAtCeiling) {
  auto policy = fp16();
  policy.max_loss_scale = 3000;
  LossScaler scaler(policy);
  EXPECT_EQ(scales(scaler, "........."),
            (Scales{1024, 1024, 2048, 2048, 2048, 3000, 3000, 3000, 3000}));
}

TEST(LossScaler, StartsWithinItsBounds) {
  auto policy = fp16();
  policy.max_loss_scale = 256;
  EXPECT_EQ(LossScaler(policy).scale(), 256);
}

TEST(LossScaler, StaticScaleNeverMoves) {
  auto policy = fp16();
  policy.loss_scale = 128;
  LossScaler scaler(policy);
  EXPECT_FALSE(scaler.dynamic());
  EXPECT_EQ(scales(scaler, "....oo.o"), Scales(8, 128));
  scaler.load({.scale = 4096, .clean_updates = 1, .overflows_in_row = 0});
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, IsOneOutsideFp16) {
  for (auto dtype : {config::DType::fp32, config::DType::bf16}) {
    auto policy = fp16();
    policy.dtype = dtype;
    policy.loss_scale = 128;
    LossScaler scaler(policy);
    EXPECT_FALSE(scaler.dynamic());
    EXPECT_EQ(scales(scaler, "...o"), Scales(4, 1));
  }
}

TEST(LossScaler, ContinuesFromALoadedState) {
  auto policy = fp16();
  policy.loss_scale_hysteresis = 2;
  const std::string windows = "..o.o..oo.....oo.o..";
  for (std::size_t cut = 0; cut <= windows.size(); ++cut) {
    LossScaler whole(policy), first(policy), second(policy);
    const Scales want = scales(whole, windows);
    Scales got = scales(first, windows.substr(0, cut));
    second.load(first.state());
    for (double scale : scales(second, windows.substr(cut))) got.push_back(scale);
    EXPECT_EQ(got, want) << "cut at " << cut;
  }
}

TEST(LossScaler, RefusesADamagedState) {
  LossScaler scaler(fp16());
  const double inf = std::numeric_limits<double>::infinity();
  for (double bad : {0.0, -2.0, inf, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(scaler.load({.scale = bad}), Error) << bad;
  }
  EXPECT_THROW(scaler.load({.scale = 1, .clean_updates = -1}), Error);
  EXPECT_THROW(scaler.load({.scale = 1, .overflows_in_row = -1}), Error);
  EXPECT_EQ(scaler.scale(), 1024);
}

// torch's scaler knows neither hysteresis nor bounds; without them the two must agree at every
// update.
TEST(LossScaler, AgreesWithTorchAtEveryUpdate) {
  auto policy = fp16();
  policy.min_loss_scale = 1e-30;
  policy.max_loss_scale = 1e30;
  LossScaler scaler(policy);
  at::Tensor scale = at::full({1}, policy.initial_loss_scale);
  at::Tensor tracker = at::zeros({1}, at::kInt);
  std::mt19937 random(7);
  for (int update = 0; update < 500; ++update) {
    const bool overflow = random() % 5 == 0;
    const at::Tensor found = at::full({1}, overflow ? 1.0f : 0.0f);
    at::_amp_update_scale_(scale, tracker, found, policy.loss_scale_growth,
                           policy.loss_scale_backoff, policy.loss_scale_growth_interval);
    scaler.update(overflow);
    ASSERT_EQ(scaler.scale(), scale.item<float>()) << "update " << update;
    ASSERT_EQ(scaler.state().clean_updates, tracker.item<int>()) << "update " << update;
  }
}

}  // namespace
}  // namespace poise::precision
