// The norm against sums made another way, and the promise about infinities and NaNs.
#include "kernels/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/chunks.h"

namespace poise::kernels {
namespace {

double sum_of(const std::vector<float>& data) {
  const Piece whole{0, static_cast<std::int64_t>(data.size())};
  double sum = -1;
  squared_norms(Launch{}, DType::f32, data.data(), &whole, 1, &sum);
  return sum;
}

TEST(Norm, AgreesWithALongDoubleSum) {
  std::vector<float> data(3 * kChunk + 5);
  long double expected = 0;
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = std::sin(static_cast<float>(i)) * std::exp2(static_cast<float>(i % 20) - 10.0f);
    expected += static_cast<long double>(data[i]) * data[i];
  }
  EXPECT_NEAR(sum_of(data), static_cast<double>(expected), 1e-14 * static_cast<double>(expected));
}

TEST(Norm, IsFiniteExactlyWhereEveryElementIs) {
  std::vector<float> data(kChunk + 20, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(sum_of(data)));  // the squares overflow a float
  const float bad[] = {std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN()};
  for (const float value : bad) {
    for (const std::size_t where : {std::size_t{0}, std::size_t{16}, data.size() - 1}) {
      std::vector<float> broken = data;
      broken[where] = value;
      EXPECT_FALSE(std::isfinite(sum_of(broken))) << value << " at " << where;
    }
  }
}

TEST(Norm, SmallestDenormalIsNotLost) {
  const double tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(sum_of({std::numeric_limits<float>::denorm_min()}), tiny * tiny);
}

}  // namespace
}  // namespace poise::kernels
