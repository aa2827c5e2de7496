// Every kernel on every target against the reference back end, bit for bit (a NaN equals any NaN:
// which operand's payload survives is the instruction's choice): odd sizes, empty spans, unaligned
// views, infinities, NaNs, denormals.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "kernels/accumulate.h"
#include "kernels/adafactor.h"
#include "kernels/adamw.h"
#include "kernels/adamw_low.h"
#include "kernels/chunks.h"
#include "kernels/lamb.h"
#include "kernels/lars.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/sgd.h"
#include "kernels/targets.h"

namespace poise::kernels {
namespace {

using testing::Target;

const std::int64_t kSizes[] = {0, 1, 3, 15, 16, 17, 255, kChunk - 1, kChunk, kChunk + 1, 40001};
const at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// Values of many magnitudes; `special` mixes in infinities, NaNs and denormals.
at::Tensor values(std::int64_t numel, at::ScalarType type, std::uint32_t seed, bool special) {
  const float odd[] = {std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN(),
                       1e-41f,
                       -1e-45f,
                       6e-8f,
                       -0.0f,
                       65519.0f,
                       3e38f};
  at::Tensor tensor = at::empty({numel + 1}, at::kFloat);
  auto* data = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i <= numel; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const auto unit = static_cast<float>(static_cast<std::int32_t>(seed)) * 0x1p-31f;
    data[i] = unit * std::exp2(static_cast<float>(seed >> 8 & 15) - 12.0f);
    if (special && (seed >> 16) % 5 == 0) data[i] = odd[(seed >> 20) % 9];
  }
  // A view that starts at an odd element: no vector load of it is aligned.
  return tensor.to(type).narrow(0, 1, numel);
}

// A copy on the target, again at an odd element.
at::Tensor on(const c10::Device& device, const at::Tensor& tensor) {
  at::Tensor base = at::empty({tensor.numel() + 1}, tensor.options().device(device));
  base.narrow(0, 1, tensor.numel()).copy_(tensor);
  return base.narrow(0, 1, tensor.numel());
}

::testing::AssertionResult same_bits(const at::Tensor& expected,
                                     const at::Tensor& actual_anywhere) {
  if (expected.numel() == 0) return ::testing::AssertionSuccess();
  const at::Tensor actual = actual_anywhere.cpu();
  const auto width = static_cast<std::int64_t>(expected.element_size());
  const auto* e = static_cast<const char*>(expected.const_data_ptr());
  const auto* a = static_cast<const char*>(actual.const_data_ptr());
  if (std::memcmp(e, a, expected.numel() * width) == 0) return ::testing::AssertionSuccess();
  const at::Tensor expected_wide = expected.to(at::kDouble);
  const at::Tensor actual_wide = actual.to(at::kDouble);
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const double left = expected_wide.const_data_ptr<double>()[i];
    const double right = actual_wide.const_data_ptr<double>()[i];
    if (std::memcmp(e + i * width, a + i * width, width) == 0) continue;
    if (std::isnan(left) && std::isnan(right)) continue;
    return ::testing::AssertionFailure()
           << "element " << i << " of " << expected.numel() << ": " << left << " became " << right;
  }
  return ::testing::AssertionSuccess();
}

const Launch kReference{Backend::reference, nullptr, nullptr};

class Equality : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    const std::string reason = testing::reason_to_skip();
    if (!reason.empty()) GTEST_SKIP() << reason;
    forced_ = GetParam().force();
  }
  const c10::Device& device() const { return GetParam().device; }
  Launch launch() const { return GetParam().launch(); }

 private:
  std::shared_ptr<void> forced_;
};

TEST_P(Equality, SquaredNorms) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor data = values(100000, type, 7, false);
    const at::Tensor there = on(device(), data);
    std::vector<Piece> pieces;
    std::int64_t begin = 0;
    const auto add = [&](std::int64_t size) {
      pieces.push_back({begin, begin + size});
      begin += size + 1;
    };
    for (const std::int64_t size : kSizes) add(size);
    for (int i = 0; i < 100; ++i) add(i % 7);
    const auto count = static_cast<std::int64_t>(pieces.size());
    at::Tensor expected = at::zeros({count}, at::kDouble);
    at::Tensor actual = at::zeros({count}, at::TensorOptions(at::kDouble).device(device()));
    squared_norms(kReference, kernel_dtype(type), data.data_ptr(), pieces.data(), count,
                  expected.data_ptr<double>());
    squared_norms(launch(), kernel_dtype(type), there.data_ptr(), pieces.data(), count,
                  actual.data_ptr<double>());
    EXPECT_TRUE(same_bits(expected, actual)) << type;
  }
}

TEST_P(Equality, AccumulateWithAndWithoutNorm) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t size : kSizes) {
      for (const Accumulate mode : {Accumulate::write, Accumulate::add}) {
        for (const bool special : {false, true}) {
          const at::Tensor gradient = values(size, type, 11, special);
          at::Tensor expected = values(size, at::kFloat, 13, special);
          at::Tensor plain = on(device(), expected);
          at::Tensor folded = on(device(), expected);
          const at::Tensor there = on(device(), gradient);
          at::Tensor norm = at::zeros({2}, at::kDouble);
          at::Tensor folded_norm = at::zeros({1}, at::TensorOptions(at::kDouble).device(device()));
          const DType dtype = kernel_dtype(type);
          accumulate(kReference, mode, expected.data_ptr<float>(), dtype, gradient.data_ptr(), size,
                     0.3f, norm.data_ptr<double>());
          accumulate(launch(), mode, plain.data_ptr<float>(), dtype, there.data_ptr(), size, 0.3f,
                     nullptr);
          accumulate(launch(), mode, folded.data_ptr<float>(), dtype, there.data_ptr(), size, 0.3f,
                     folded_norm.data_ptr<double>());
          EXPECT_TRUE(same_bits(expected, plain)) << type << " " << size;
          EXPECT_TRUE(same_bits(expected, folded)) << type << " " << size;
          EXPECT_TRUE(same_bits(norm.narrow(0, 0, 1), folded_norm)) << type << " " << size;
        }
      }
    }
  }
}

// Four segments with gaps, the third empty, the last longer than several chunks.
template <class Segment>
std::vector<Segment> some_segments() {
  return {{0, 5, 0.1, 0.01}, {16, 300, 0.02, 0.0}, {400, 400, 0.5, 0.5}, {401, 30000, 0.003, 0.2}};
}
constexpr std::int64_t kFlat = 30010;

TEST_P(Equality, AdamWAndAdam) {
  const auto segments = some_segments<AdamSegment>();
  for (const at::ScalarType type : kTypes) {
    for (const int low_type : {0, 1, 2}) {
      for (const bool decoupled : {true, false}) {
        const bool special = low_type != 0;
        const at::ScalarType low_scalar = low_type == 2 ? at::kHalf : at::kBFloat16;
        const at::Tensor gradient = values(kFlat, type, 3, special);
        std::vector<at::Tensor> expected = {
            values(kFlat, at::kFloat, 4, special), values(kFlat, at::kFloat, 5, special),
            values(kFlat, at::kFloat, 6, false).abs(), values(kFlat, low_scalar, 8, false)};
        expected[2] = on(c10::Device(c10::kCPU), expected[2]);
        std::vector<at::Tensor> actual;
        for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
        const at::Tensor there = on(device(), gradient);
        const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                             const at::Tensor& g) {
          AdamArrays arrays;
          arrays.master = t[0].data_ptr<float>();
          arrays.moment1 = t[1].data_ptr<float>();
          arrays.moment2 = t[2].data_ptr<float>();
          arrays.low = low_type == 0 ? nullptr : t[3].data_ptr();
          arrays.low_dtype = kernel_dtype(low_scalar);
          arrays.gradient = g.data_ptr();
          arrays.gradient_dtype = kernel_dtype(type);
          AdamSettings settings;
          settings.decoupled = decoupled;
          settings.step = 3;
          settings.factor = 0.7;
          adamw(launch, arrays, segments.data(), 4, settings);
        };
        run(kReference, expected, gradient);
        run(launch(), actual, there);
        for (int i = 0; i < 4; ++i) {
          EXPECT_TRUE(same_bits(expected[i], actual[i]))
              << type << " " << low_type << " array " << i;
        }
      }
    }
  }
}

// Segments that begin where blocks do, the second one cut short.
TEST_P(Equality, AdamWWithMomentsInFewerBits) {
  const std::vector<RoundedSegment> segments{{0, 256, 0.1, 0.01, 0, 1},
                                             {512, 900, 0.02, 0.0, 1000, 2},
                                             {1024, 1024, 0.5, 0.5, 0, 3},
                                             {1024, 30000, 0.003, 0.2, 0, 4}};
  constexpr std::int64_t kBlocks = (kFlat + kQuantBlock - 1) / kQuantBlock;
  for (const at::ScalarType type : kTypes) {
    for (const bool decoupled : {true, false}) {
      for (const bool eight : {false, true}) {
        const bool special = !eight && type == at::kFloat;
        const at::Tensor gradient = values(kFlat, type, 3, special);
        std::vector<at::Tensor> expected = {values(kFlat, at::kFloat, 4, special),
                                            values(kFlat, at::kHalf, 8, false)};
        if (eight) {
          const auto codes = [&](std::uint32_t seed) {
            return values(kFlat, at::kFloat, seed, false)
                .mul(3e4)
                .abs()
                .remainder(255)
                .to(at::kByte);
          };
          const at::Tensor scale1 = values(kBlocks, at::kFloat, 9, false).abs();
          const at::Tensor scale2 = values(kBlocks, at::kFloat, 10, false).abs();
          for (const at::Tensor& t : {codes(5), scale1, codes(6), scale2}) {
            expected.push_back(on(c10::Device(c10::kCPU), t));
          }
        } else {
          for (const std::uint32_t seed : {5, 6}) {
            expected.push_back(on(c10::Device(c10::kCPU),
                                  values(kFlat, at::kBFloat16, seed, special && seed == 5).abs()));
          }
        }
        std::vector<at::Tensor> actual;
        for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
        const at::Tensor there = on(device(), gradient);
        const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                             const at::Tensor& g) {
          AdamSettings settings;
          settings.decoupled = decoupled;
          settings.step = 3;
          settings.factor = 0.7;
          const auto with = [&](auto arrays) {
            arrays.master = t[0].data_ptr<float>();
            arrays.low = t[1].data_ptr();
            arrays.low_dtype = DType::f16;
            arrays.gradient = g.data_ptr();
            arrays.gradient_dtype = kernel_dtype(type);
            return arrays;
          };
          if (eight) {
            auto arrays = with(Adam8BitArrays());
            arrays.code1 = t[2].data_ptr<std::uint8_t>();
            arrays.scale1 = t[3].data_ptr<float>();
            arrays.code2 = t[4].data_ptr<std::uint8_t>();
            arrays.scale2 = t[5].data_ptr<float>();
            return adamw_8bit(launch, arrays, segments.data(), 4, settings);
          }
          auto arrays = with(AdamBf16Arrays());
          arrays.moment1 = static_cast<Bf16*>(t[2].data_ptr());
          arrays.moment2 = static_cast<Bf16*>(t[3].data_ptr());
          adamw_bf16(launch, arrays, segments.data(), 4, settings);
        };
        run(kReference, expected, gradient);
        run(launch(), actual, there);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(same_bits(expected[i], actual[i]))
              << type << (eight ? " 8 bits" : " bf16") << " array " << i;
        }
      }
    }
  }
}

// A matrix, one that lies by columns, a tensor of four dimensions with channels last, a row of
// numbers; pieces of them that begin anywhere.
TEST_P(Equality, AdafactorAndItsSums) {
  struct Shape {
    std::vector<std::int64_t> sizes, strides;
    std::int64_t begin, end, first;  // the piece in the flat, and its place in the parameter
  };
  const std::vector<Shape> shapes{{{90, 110}, {110, 1}, 1, 9000, 17},
                                  {{70, 60}, {1, 70}, 9001, 9001 + 4200, 0},
                                  {{5, 6, 7, 8}, {336, 1, 48, 6}, 13300, 14900, 33},
                                  {{300}, {1}, 15000, 15299, 1},
                                  {{100, 100}, {100, 1}, 15300, 15300, 50},
                                  {{200, 300}, {300, 1}, 15301, 30000, 20000}};
  std::int64_t factors = 0;
  std::vector<FactoredSegment> segments;
  for (const Shape& shape : shapes) {
    FactoredSegment segment;
    segment.begin = shape.begin;
    segment.end = shape.end;
    segment.first = shape.first;
    segment.lr = 0.1;
    segment.decay = 0.01;
    segment.layout = factor_layout(shape.sizes.data(), shape.strides.data(),
                                   static_cast<int>(shape.sizes.size()), factors);
    factors += segment.layout.num_rows + segment.layout.num_columns;
    segments.push_back(segment);
  }
  const auto count = static_cast<std::int64_t>(segments.size());
  for (const at::ScalarType type : kTypes) {
    const bool special = type == at::kBFloat16;
    const at::Tensor gradient = values(kFlat, type, 3, special);
    const std::vector<at::Tensor> expected = {
        values(kFlat, at::kFloat, 4, special), values(kFlat, at::kBFloat16, 8, false),
        on(c10::Device(c10::kCPU), values(factors, at::kFloat, 5, false).abs()),
        values(factors, at::kFloat, 12, false).to(at::kDouble),  // sums to add to
        at::zeros({count}, at::kDouble)};
    std::vector<at::Tensor> actual;
    for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
    const at::Tensor there = on(device(), gradient);
    const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                         const at::Tensor& g) {
      FactoredArrays arrays;
      arrays.master = t[0].data_ptr<float>();
      arrays.low = t[1].data_ptr();
      arrays.gradient = g.data_ptr();
      arrays.gradient_dtype = kernel_dtype(type);
      arrays.factors = t[2].data_ptr<float>();
      factor_sums(launch, arrays, segments.data(), count, 0.7, t[3].data_ptr<double>());
      factored_squares(launch, arrays, segments.data(), count, 0.7, t[4].data_ptr<double>());
      adafactor(launch, arrays, segments.data(), count, 0.7);
    };
    run(kReference, expected, gradient);
    run(launch(), actual, there);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(expected[i], actual[i])) << type << " array " << i;
    }
  }
}

TEST_P(Equality, LambAndItsSquares) {
  const std::vector<LambSegment> segments{{0, 5, 0.1, 0.01, 2.0},
                                          {16, 300, 0.02, 0.0, 0.5},
                                          {400, 400, 0.5, 0.5, 1.0},
                                          {401, 30000, 0.003, 0.2, 0.01}};
  for (const at::ScalarType type : kTypes) {
    for (const int low_type : {0, 1, 2}) {
      const bool special = low_type == 1;
      const at::ScalarType low_scalar = low_type == 2 ? at::kHalf : at::kBFloat16;
      const at::Tensor gradient = values(kFlat, type, 3, special);
      std::vector<at::Tensor> expected = {
          values(kFlat, at::kFloat, 4, special), values(kFlat, at::kFloat, 5, special),
          values(kFlat, at::kFloat, 6, false).abs(), values(kFlat, low_scalar, 8, false),
          at::zeros({4}, at::kDouble)};
      std::vector<at::Tensor> actual;
      for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
      const at::Tensor there = on(device(), gradient);
      const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                           const at::Tensor& g) {
        AdamArrays arrays;
        arrays.master = t[0].data_ptr<float>();
        arrays.moment1 = t[1].data_ptr<float>();
        arrays.moment2 = t[2].data_ptr<float>();
        arrays.low = low_type == 0 ? nullptr : t[3].data_ptr();
        arrays.low_dtype = kernel_dtype(low_scalar);
        arrays.gradient = g.data_ptr();
        arrays.gradient_dtype = kernel_dtype(type);
        AdamSettings settings;
        settings.step = 3;
        settings.factor = 0.7;
        lamb_squares(launch, arrays, segments.data(), 4, settings, t[4].data_ptr<double>());
        lamb(launch, arrays, segments.data(), 4, settings);
      };
      run(kReference, expected, gradient);
      run(launch(), actual, there);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(same_bits(expected[i], actual[i])) << type << " " << low_type << " array " << i;
      }
    }
  }
}

TEST_P(Equality, Lars) {
  const auto segments = some_segments<LarsSegment>();
  for (const at::ScalarType type : kTypes) {
    for (const int low_type : {0, 1, 2}) {
      const bool special = low_type == 1;
      const at::ScalarType low_scalar = low_type == 2 ? at::kHalf : at::kBFloat16;
      const at::Tensor gradient = values(kFlat, type, 3, special);
      const std::vector<at::Tensor> expected = {values(kFlat, at::kFloat, 4, special),
                                                values(kFlat, at::kFloat, 5, special),
                                                values(kFlat, low_scalar, 8, false)};
      std::vector<at::Tensor> actual;
      for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
      const at::Tensor there = on(device(), gradient);
      const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                           const at::Tensor& g) {
        LarsArrays arrays;
        arrays.master = t[0].data_ptr<float>();
        arrays.momentum = t[1].data_ptr<float>();
        arrays.low = low_type == 0 ? nullptr : t[2].data_ptr();
        arrays.low_dtype = kernel_dtype(low_scalar);
        arrays.gradient = g.data_ptr();
        arrays.gradient_dtype = kernel_dtype(type);
        lars(launch, arrays, segments.data(), 4, {0.9, 0.7});
      };
      run(kReference, expected, gradient);
      run(launch(), actual, there);
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(same_bits(expected[i], actual[i])) << type << " " << low_type << " array " << i;
      }
    }
  }
}

TEST_P(Equality, Lion) {
  const auto segments = some_segments<LionSegment>();
  for (const at::ScalarType type : kTypes) {
    for (const int low_type : {0, 1, 2}) {
      const bool special = low_type == 1;
      const at::ScalarType low_scalar = low_type == 2 ? at::kHalf : at::kBFloat16;
      const at::Tensor gradient = values(kFlat, type, 3, special);
      const std::vector<at::Tensor> expected = {values(kFlat, at::kFloat, 4, special),
                                                values(kFlat, at::kFloat, 5, special),
                                                values(kFlat, low_scalar, 8, false)};
      std::vector<at::Tensor> actual;
      for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
      const at::Tensor there = on(device(), gradient);
      const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                           const at::Tensor& g) {
        LionArrays arrays;
        arrays.master = t[0].data_ptr<float>();
        arrays.momentum = t[1].data_ptr<float>();
        arrays.low = low_type == 0 ? nullptr : t[2].data_ptr();
        arrays.low_dtype = kernel_dtype(low_scalar);
        arrays.gradient = g.data_ptr();
        arrays.gradient_dtype = kernel_dtype(type);
        lion(launch, arrays, segments.data(), 4, {0.9, 0.99, 0.7});
      };
      run(kReference, expected, gradient);
      run(launch(), actual, there);
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(same_bits(expected[i], actual[i])) << type << " " << low_type << " array " << i;
      }
    }
  }
}

TEST_P(Equality, LionWithItsMomentumIn8Bits) {
  const std::vector<RoundedSegment> segments{{0, 256, 0.1, 0.01, 0, 1},
                                             {512, 900, 0.02, 0.0, 1000, 2},
                                             {1024, 1024, 0.5, 0.5, 0, 3},
                                             {1024, 30000, 0.003, 0.2, 0, 4}};
  constexpr std::int64_t kBlocks = (kFlat + kQuantBlock - 1) / kQuantBlock;
  for (const at::ScalarType type : kTypes) {
    const at::Tensor gradient = values(kFlat, type, 3, false);
    const at::Tensor codes =
        values(kFlat, at::kFloat, 5, false).mul(3e4).abs().remainder(255).to(at::kByte);
    const std::vector<at::Tensor> expected = {
        values(kFlat, at::kFloat, 4, false), values(kFlat, at::kBFloat16, 8, false),
        on(c10::Device(c10::kCPU), codes), values(kBlocks, at::kFloat, 9, false).abs()};
    std::vector<at::Tensor> actual;
    for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
    const at::Tensor there = on(device(), gradient);
    const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                         const at::Tensor& g) {
      Lion8BitArrays arrays;
      arrays.master = t[0].data_ptr<float>();
      arrays.low = t[1].data_ptr();
      arrays.gradient = g.data_ptr();
      arrays.gradient_dtype = kernel_dtype(type);
      arrays.code = t[2].data_ptr<std::uint8_t>();
      arrays.scale = t[3].data_ptr<float>();
      lion_8bit(launch, arrays, segments.data(), 4, {0.9, 0.99, 0.7});
    };
    run(kReference, expected, gradient);
    run(launch(), actual, there);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(expected[i], actual[i])) << type << " array " << i;
    }
  }
}

TEST_P(Equality, Sgd) {
  const auto segments = some_segments<SgdSegment>();
  for (const at::ScalarType type : kTypes) {
    for (const int kind : {0, 1, 2}) {  // plain, momentum, nesterov
      const bool special = kind == 1;
      const at::ScalarType low_scalar = kind == 2 ? at::kHalf : at::kBFloat16;
      const at::Tensor gradient = values(kFlat, type, 3, special);
      const std::vector<at::Tensor> expected = {values(kFlat, at::kFloat, 4, special),
                                                values(kFlat, at::kFloat, 5, special),
                                                values(kFlat, low_scalar, 8, false)};
      std::vector<at::Tensor> actual;
      for (const at::Tensor& tensor : expected) actual.push_back(on(device(), tensor));
      const at::Tensor there = on(device(), gradient);
      const auto run = [&](const Launch& launch, const std::vector<at::Tensor>& t,
                           const at::Tensor& g) {
        SgdArrays arrays;
        arrays.master = t[0].data_ptr<float>();
        arrays.momentum = kind == 0 ? nullptr : t[1].data_ptr<float>();
        arrays.low = t[2].data_ptr();
        arrays.low_dtype = kernel_dtype(low_scalar);
        arrays.gradient = g.data_ptr();
        arrays.gradient_dtype = kernel_dtype(type);
        sgd(launch, arrays, segments.data(), 4, {kind == 0 ? 0.0 : 0.9, kind == 2, 0.7});
      };
      run(kReference, expected, gradient);
      run(launch(), actual, there);
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(same_bits(expected[i], actual[i])) << type << " " << kind << " array " << i;
      }
    }
  }
}

TEST_P(Equality, PackOfEveryPairOfTypes) {
  for (const at::ScalarType from : kTypes) {
    for (const at::ScalarType to : kTypes) {
      for (const float scale : {1.0f, 0.3f}) {
        std::vector<at::Tensor> sources, expected, actual, there;
        std::vector<PackPiece> pieces, pieces_there;
        for (const std::int64_t size : kSizes) {
          sources.push_back(values(size, from, 17, true));
          expected.push_back(values(size, to, 1, false));
          there.push_back(on(device(), sources.back()));
          actual.push_back(on(device(), expected.back()));
          pieces.push_back({sources.back().data_ptr(), expected.back().data_ptr(), size});
          pieces_there.push_back({there.back().data_ptr(), actual.back().data_ptr(), size});
        }
        const auto count = static_cast<std::int64_t>(pieces.size());
        pack(kReference, kernel_dtype(from), kernel_dtype(to), pieces.data(), count, scale);
        pack(launch(), kernel_dtype(from), kernel_dtype(to), pieces_there.data(), count, scale);
        for (std::size_t i = 0; i < pieces.size(); ++i) {
          EXPECT_TRUE(same_bits(expected[i], actual[i])) << from << " to " << to << " piece " << i;
          if (scale == 1.0f) {
            EXPECT_TRUE(same_bits(sources[i].to(to), actual[i]))
                << "torch: " << from << " to " << to;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Equality, ::testing::ValuesIn(testing::targets()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace poise::kernels
