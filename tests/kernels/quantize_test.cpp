// 8-bit codes against the grid of levels written down in float64, and rounding at random against
// its expectation.
#include "kernels/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/random.h"

namespace poise::kernels {
namespace {

// Levels in [0, 1], ascending: 2^(d + shift) of them above 10^(d - 7), up to ten times that.
std::vector<double> levels(int shift) {
  std::vector<double> all{0};
  for (int d = 0; d < 7; ++d) {
    const double begin = d == 0 ? 0 : std::pow(10.0, d - 7), end = std::pow(10.0, d - 6);
    const int count = 1 << (d + shift);
    for (int i = 1; i <= count; ++i) all.push_back(begin + (end - begin) * i / count);
  }
  return all;
}

std::vector<float> magnitudes() {
  std::vector<float> all{0, 1, 1e-7f, 1e-8f, 5e-7f, 1e-30f};
  for (int i = 0; i < 20000; ++i) {
    all.push_back(static_cast<float>(std::pow(10.0, -7.5 * (i + 0.37) / 20000)));
  }
  return all;
}

TEST(Quantize, CodesAreLevelsInOrder) {
  const auto of_signed = levels(0), of_unsigned = levels(1);
  ASSERT_EQ(of_signed.size(), 128u);
  ASSERT_EQ(of_unsigned.size(), 255u);
  for (int code = 0; code < 128; ++code) {
    const double level = of_signed[static_cast<std::size_t>(code)];
    EXPECT_NEAR(decode_signed(static_cast<std::uint8_t>(code), 2.0f), 2 * level, 1e-6 * level);
    EXPECT_NEAR(decode_signed(static_cast<std::uint8_t>(code | 128), 2.0f), -2 * level,
                1e-6 * level);
  }
  for (int code = 0; code < 255; ++code) {
    const double level = of_unsigned[static_cast<std::size_t>(code)];
    EXPECT_NEAR(decode_unsigned(static_cast<std::uint8_t>(code), 0.5f), 0.5 * level, 1e-6 * level);
  }
}

TEST(Quantize, SignedGoesToTheNearestLevel) {
  const auto all = levels(0);
  for (const float scale : {1.0f, 3.7e-5f, 1e20f}) {
    for (const float magnitude : magnitudes()) {
      const float value = magnitude * scale;
      const double exact = static_cast<double>(value) / scale;
      double nearest = 1;
      for (const double level : all) nearest = std::min(nearest, std::abs(level - exact));
      for (const float sign : {1.0f, -1.0f}) {
        const float back = decode_signed(encode_signed(sign * value, scale), scale);
        const double error = std::abs(static_cast<double>(back) / scale - sign * exact);
        ASSERT_LE(error, nearest + 1e-6 * exact) << value << " of " << scale;
      }
    }
  }
  EXPECT_EQ(decode_signed(encode_signed(-0.3f, 0.3f), 0.3f), -0.3f) << "the largest one is exact";
  EXPECT_EQ(encode_signed(0.0f, 0.0f), 0) << "a block of zeros";
}

TEST(Quantize, UnsignedGoesToANeighbourAndIsRightOnAverage) {
  const auto all = levels(1);
  const RandomKey key = random_key(0x1234567890ABCDEFu);
  constexpr int kTries = 4096;
  for (int i = 0; i < 300; ++i) {
    const double exact = std::pow(10.0, -6.0 * (i + 0.5) / 300);
    const auto value = static_cast<float>(exact);
    const auto above = std::upper_bound(all.begin(), all.end(), exact);
    ASSERT_NE(above, all.end());
    const double low = *std::prev(above), high = *above;
    double sum = 0;
    for (int t = 0; t < kTries; ++t) {
      const auto code = encode_unsigned(value, 1.0f, random_bits(key, i * kTries + t));
      const double back = decode_unsigned(code, 1.0f);
      // What would become zero goes up instead.
      ASSERT_TRUE(std::abs(back - low) < 2e-6 * high || std::abs(back - high) < 2e-6 * high ||
                  (low == 0 && back > 0))
          << exact << " became " << back << ", between " << low << " and " << high;
      sum += back;
    }
    if (low == 0) continue;
    // Five standard errors: the variance of one try is (exact - low) (high - exact).
    const double spread = std::sqrt((exact - low) * (high - exact) / kTries);
    ASSERT_NEAR(sum / kTries, exact, 5 * spread + 1e-6 * exact) << "of " << low << ", " << high;
  }
  EXPECT_EQ(decode_unsigned(encode_unsigned(0.7f, 0.7f, 0xFFFFFFFFu), 0.7f), 0.7f);
  EXPECT_EQ(encode_unsigned(0.0f, 0.7f, 0xFFFFFFFFu), 0);
  EXPECT_GT(encode_unsigned(1e-30f, 1.0f, 0u), 0) << "what is not zero stays so";
}

TEST(Random, RoundsToBothNeighboursAsOftenAsTheyAreNear) {
  const RandomKey key = random_key(7);
  constexpr int kTries = 1 << 16;
  for (const float value : {1.0f + 0x1p-10f, -3.1415927f, 1e-20f, 6.1e4f, 0x1p-140f}) {
    const Bf16 down{static_cast<std::uint16_t>(bits_of(value) >> 16)};
    const Bf16 up{static_cast<std::uint16_t>(down.bits + 1)};
    const double low = to_float(down), high = to_float(up);
    int ups = 0;
    for (int t = 0; t < kTries; ++t) {
      const Bf16 rounded = rounded_at_random(value, random_bits(key, t) & 0xFFFFu);
      ASSERT_TRUE(rounded.bits == down.bits || rounded.bits == up.bits);
      ups += rounded.bits == up.bits;
    }
    const double share = (static_cast<double>(value) - low) / (high - low);
    EXPECT_NEAR(static_cast<double>(ups) / kTries, share,
                5 * std::sqrt(share * (1 - share) / kTries) + 1e-9)
        << value;
  }
  EXPECT_EQ(to_float(rounded_at_random(1.5f, 0xFFFFu)), 1.5f) << "what bf16 holds is exact";
  EXPECT_TRUE(std::isinf(to_float(rounded_at_random(INFINITY, 0xFFFFu))));
  EXPECT_TRUE(std::isnan(to_float(rounded_at_random(NAN, 0xFFFFu))));
}

TEST(Random, BitsAreEvenAndUnrelatedToNeighbours) {
  constexpr int kCount = 1 << 16;
  int ones[32] = {}, changed[32] = {};
  for (int i = 0; i < kCount; ++i) {
    const std::uint32_t bits = random_bits(random_key(1), i);
    const std::uint32_t next = random_bits(random_key(1), i + 1) ^ bits;
    const std::uint32_t other = random_bits(random_key(2), i) ^ bits;
    for (int b = 0; b < 32; ++b) {
      ones[b] += bits >> b & 1;
      changed[b] += (next >> b & 1) + (other >> b & 1);
    }
  }
  for (int b = 0; b < 32; ++b) {
    EXPECT_NEAR(ones[b], kCount / 2, 5 * std::sqrt(kCount / 4.0)) << b;
    EXPECT_NEAR(changed[b], kCount, 5 * std::sqrt(kCount / 2.0)) << b;
  }
  EXPECT_NE(random_bits(random_key(1), 5), random_bits(random_key(1), 5 + (std::int64_t{1} << 32)));
}

}  // namespace
}  // namespace poise::kernels
