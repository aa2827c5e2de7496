// Values of each rank that any test can make again, and plain references over them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace poise::comm {

// Magnitudes from 2^-12 to 2^12, so that the order of additions shows in the bits.
inline std::vector<float> values_of(int rank, std::int64_t numel, unsigned salt = 0) {
  std::mt19937 random(1000u * salt + static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> mantissa(-2, 2);
  std::uniform_int_distribution<int> exponent(-12, 12);
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (auto& value : values) value = std::ldexp(mantissa(random), exponent(random));
  return values;
}

inline at::Tensor flat_of(const std::vector<float>& values, at::ScalarType type = at::kFloat) {
  auto flat = at::empty({static_cast<std::int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), flat.mutable_data_ptr<float>());
  return flat.to(type);
}

// ((x0 + x1) + x2) + ... of what `type` keeps of the values.
inline at::Tensor sum_in_order(int size, std::int64_t numel, at::ScalarType type,
                               unsigned salt = 0) {
  auto sum = at::empty({numel}, at::kFloat);
  auto* out = sum.mutable_data_ptr<float>();
  for (int rank = 0; rank < size; ++rank) {
    const auto kept = flat_of(values_of(rank, numel, salt), type).to(at::kFloat);
    const auto* in = kept.const_data_ptr<float>();
    for (std::int64_t i = 0; i < numel; ++i) out[i] = rank == 0 ? in[i] : out[i] + in[i];
  }
  return sum;
}

inline ::testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& want) {
  if (got.scalar_type() != want.scalar_type() || got.sizes() != want.sizes()) {
    return ::testing::AssertionFailure() << "another dtype or size";
  }
  const auto* a = static_cast<const unsigned char*>(got.const_data_ptr());
  const auto* b = static_cast<const unsigned char*>(want.const_data_ptr());
  for (std::size_t i = 0; i < got.nbytes(); ++i) {
    if (a[i] != b[i]) {
      return ::testing::AssertionFailure() << "element " << i / got.element_size() << " differs";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace poise::comm
