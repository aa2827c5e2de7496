// Conversions against torch's own, bit for bit.
#include "kernels/cast.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

namespace poise::kernels {
namespace {

// Every exponent and sign with mantissas around the rounding points of both 16-bit types.
template <class Use>
void for_interesting_floats(Use use) {
  const std::uint32_t mantissas[] = {0,        1,        0x0FFF,   0x1000,   0x1001,   0x1FFF,
                                     0x2000,   0x3000,   0x7FFF,   0x8000,   0x8001,   0xFFFF,
                                     0x10000,  0x18000,  0x2AAAAA, 0x3FFFFF, 0x400000, 0x400001,
                                     0x555555, 0x7FE000, 0x7FEFFF, 0x7FF000, 0x7FFFFF};
  for (std::uint32_t sign = 0; sign < 2; ++sign) {
    for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
      for (const std::uint32_t mantissa : mantissas) use(sign << 31 | exponent << 23 | mantissa);
    }
  }
  std::uint32_t random = 12345;
  for (int i = 0; i < 1000000; ++i) {
    random = random * 1664525u + 1013904223u;
    use(random ^ (random >> 13));
  }
}

TEST(Cast, RoundsToBf16AsTorchDoes) {
  for_interesting_floats([](std::uint32_t bits) {
    const float value = float_of(bits);
    ASSERT_EQ(from_float<Bf16>(value).bits, c10::BFloat16(value).x) << std::hex << bits;
  });
}

TEST(Cast, RoundsToFp16AsTorchDoes) {
  for_interesting_floats([](std::uint32_t bits) {
    const float value = float_of(bits);
    ASSERT_EQ(from_float<F16>(value).bits, c10::Half(value).x) << std::hex << bits;
  });
}

TEST(Cast, EverySixteenBitValueWidensAsInTorch) {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float half = c10::Half(bits, c10::Half::from_bits());
    const float bfloat = c10::BFloat16(bits, c10::BFloat16::from_bits());
    ASSERT_EQ(bits_of(to_float(F16{bits})), bits_of(half)) << std::hex << i;
    ASSERT_EQ(bits_of(to_float(Bf16{bits})), bits_of(bfloat)) << std::hex << i;
  }
}

}  // namespace
}  // namespace poise::kernels
