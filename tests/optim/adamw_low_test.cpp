// Moments in bf16 and in 8 bits: the update against float64 from the same moments, what rounding
// keeps on average, and that neither shards nor tiles change a bit.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {
namespace {

constexpr std::int64_t kNumel = 1024;

config::OptimizerPolicy policy_of(const std::string& moments, const std::string& type = "adamw") {
  config::OptimizerPolicy policy;
  policy.type = type;
  policy.moments = moments;
  return policy;
}

Span span_of(const Optimizer& optimizer, std::int64_t numel, std::int64_t end) {
  Span span;
  span.master = at::zeros({numel}, at::kFloat);
  span.low = at::zeros({numel}, at::kBFloat16);
  span.gradient = at::zeros({numel}, at::kFloat);
  for (const auto& moment : optimizer.moments()) {
    span.moments.push_back(at::zeros({numel / moment.block}, moment.dtype));
  }
  Segment whole{0, end};
  whole.parameter = 99;
  span.segments = {whole};
  return span;
}

void fill(const at::Tensor& tensor, double phase) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const auto x = static_cast<double>(i);
    const double scale = std::pow(10.0, -static_cast<double>(i % 4));
    tensor.data_ptr<float>()[i] = static_cast<float>(scale * std::sin(phase + 1.7 * x));
  }
}

const std::vector<GroupSettings> kGroups = {{1e-2, 0.1}};

// The numbers that the moments are before an update, in float64; 8 bits: by the levels' definition.
double level(int code, int shift) {
  int d = 0;
  while (d < 6 && code > (1 << (d + 1 + shift)) - (1 << shift)) ++d;
  const int above = code - ((1 << (d + shift)) - (1 << shift));
  const double begin = d == 0 ? 0 : std::pow(10.0, d - 7), end = std::pow(10.0, d - 6);
  return begin + (end - begin) * above / (1 << (d + shift));
}

std::pair<double, double> moments_at(const Span& span, std::int64_t i) {
  if (span.moments.size() == 2) {
    return {span.moments[0][i].item<double>(), span.moments[1][i].item<double>()};
  }
  const int code1 = span.moments[0][i].item<int>(), code2 = span.moments[2][i].item<int>();
  const double scale1 = span.moments[1][i / 256].item<double>();
  const double root = level(code2, 1) * span.moments[3][i / 256].item<double>();
  return {(code1 & 128 ? -1 : 1) * level(code1 & 127, 0) * scale1, root * root};
}

class Low : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  config::OptimizerPolicy policy() const {
    return policy_of(std::get<1>(GetParam()), std::get<0>(GetParam()));
  }
};

TEST_P(Low, UpdatesAsFloat64DoesFromTheSameMoments) {
  const auto policy = this->policy();
  const auto optimizer = make_optimizer(policy, 3);
  constexpr std::int64_t kEnd = kNumel - 300;  // the last block is cut short
  auto span = span_of(*optimizer, kNumel, kEnd);
  fill(span.master, 0.3);
  for (int t = 1; t <= 20; ++t) {
    fill(span.gradient, t);
    const at::Tensor before = span.master.clone();
    std::vector<std::pair<double, double>> old;
    for (std::int64_t i = 0; i < kEnd; ++i) old.push_back(moments_at(span, i));
    optimizer->apply(span, kGroups, t, 0.5);
    double largest1 = 0, largest2 = 0;  // of the block
    for (std::int64_t i = 0; i < kEnd; ++i) {
      const double p = before[i].item<double>(), decay = kGroups[0].weight_decay;
      const double g =
          0.5 * span.gradient[i].item<double>() + (policy.type == "adam" ? decay * p : 0);
      const double m = 0.9 * old[i].first + 0.1 * g;
      const double v = 0.999 * old[i].second + 0.001 * g * g;
      const double step =
          m / (1 - std::pow(0.9, t)) / (std::sqrt(v / (1 - std::pow(0.999, t))) + 1e-8);
      const double keep = policy.type == "adamw" ? 1 - 1e-2 * decay : 1;
      ASSERT_NEAR(span.master[i].item<double>(), p * keep - 1e-2 * step, 1e-6) << t << " " << i;
      ASSERT_EQ(span.low[i].item<float>(), span.master.to(at::kBFloat16)[i].item<float>());
      if (policy.moments == "bf16") continue;
      if (i % 256 == 0) {
        largest1 = largest2 = 0;
        for (std::int64_t j = i; j < std::min(i + 256, kEnd); ++j) {
          const double gj = 0.5 * span.gradient[j].item<double>() +
                            (policy.type == "adam" ? decay * before[j].item<double>() : 0);
          largest1 = std::max(largest1, std::abs(0.9 * old[j].first + 0.1 * gj));
          largest2 = std::max(largest2, std::sqrt(0.999 * old[j].second + 0.001 * gj * gj));
        }
        ASSERT_NEAR(span.moments[1][i / 256].item<double>(), largest1, 1e-6 * largest1);
        ASSERT_NEAR(span.moments[3][i / 256].item<double>(), largest2, 1e-6 * largest2);
      }
      // Half a level of 64 in the decade of the largest; a whole one of 128.
      const auto [m8, v8] = moments_at(span, i);
      ASSERT_LE(std::abs(m8 - m), 0.9 / 64 / 2 * largest1 * 1.001);
      ASSERT_LE(std::abs(std::sqrt(v8) - std::sqrt(v)), 0.9 / 128 * largest2 * 1.001);
    }
  }
  for (std::int64_t i = kEnd; i < kNumel; ++i) {
    EXPECT_EQ(span.master[i].item<float>(), span.master[i].item<float>());
    EXPECT_EQ(span.moments[0][i].item<float>(), 0) << "padding";
  }
}

// Without a gradient the second moment is 0.999 of itself after each update, which is less than
// half a step of bf16 or of a level: rounded to nearest it would stay for ever.
TEST_P(Low, SlowDecayIsKeptOnAverage) {
  const auto optimizer = make_optimizer(policy(), 5);
  constexpr std::int64_t kMany = 65536;
  auto span = span_of(*optimizer, kMany, kMany);
  for (std::int64_t i = 0; i < kMany; ++i) {  // one of each block is ten times as large
    span.gradient.data_ptr<float>()[i] = i % 256 == 0 ? 10.0f : 1.0f;
  }
  optimizer->apply(span, {{0, 0}}, 1, 1);
  const auto mean_root = [&] {
    double sum = 0;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < kMany; ++i) {
      if (i % 256 == 0) continue;
      sum += std::sqrt(moments_at(span, i).second);
      ++count;
    }
    return sum / static_cast<double>(count);
  };
  const double start = mean_root();
  EXPECT_NEAR(start, std::sqrt(0.001), 2e-3 * start);
  span.gradient.zero_();
  for (int t = 2; t <= 201; ++t) optimizer->apply(span, {{0, 0}}, t, 1);
  const double want = start * std::pow(0.999, 200.0 / 2);
  EXPECT_NEAR(mean_root(), want, 4e-3 * want);
  EXPECT_LT(want, 0.91 * start);
}

// A parameter cut over two shards, in tiles, at another place of the flat.
TEST_P(Low, ShardsAndPlacesChangeNoBit) {
  const auto optimizer = make_optimizer(policy(), 11);
  auto whole = span_of(*optimizer, kNumel, kNumel - 10);
  std::vector<Span> shards;
  for (const std::int64_t begin : {0, 512}) {
    auto shard = span_of(*optimizer, 1024, 0);
    Segment part{256, begin == 0 ? 768 : 758};
    part.first = begin;
    part.parameter = 99;
    shard.segments = {part};
    shards.push_back(shard);
  }
  fill(whole.master, 0.1);
  for (std::size_t s = 0; s < 2; ++s) {
    shards[s]
        .master.narrow(0, 256, 512)
        .copy_(whole.master.narrow(0, static_cast<std::int64_t>(512 * s), 512));
  }
  for (int t = 1; t <= 5; ++t) {
    fill(whole.gradient, t);
    optimizer->apply(whole, kGroups, t, 0.5);
    for (std::size_t s = 0; s < 2; ++s) {
      const std::int64_t begin = static_cast<std::int64_t>(512 * s), count = s == 0 ? 512 : 502;
      auto& shard = shards[s];
      shard.gradient.narrow(0, 256, 512).copy_(whole.gradient.narrow(0, begin, 512));
      optimizer->apply(shard, kGroups, t, 0.5);
      EXPECT_TRUE(
          at::equal(shard.master.narrow(0, 256, count), whole.master.narrow(0, begin, count)));
      for (std::size_t m = 0; m < whole.moments.size(); ++m) {
        const auto block = optimizer->moments()[m].block;
        EXPECT_TRUE(at::equal(shard.moments[m].narrow(0, 256 / block, 512 / block),
                              whole.moments[m].narrow(0, begin / block, 512 / block)))
            << "moment " << m << " shard " << s;
      }
    }
  }
}

TEST_P(Low, SeedUpdateAndParameterChangeTheRounding) {
  const auto after = [&](std::uint64_t seed, std::int64_t update, std::uint64_t parameter) {
    const auto optimizer = make_optimizer(policy(), seed);
    auto span = span_of(*optimizer, kNumel, kNumel);
    span.segments[0].parameter = parameter;
    fill(span.gradient, 1);
    optimizer->apply(span, kGroups, update, 1);
    return span.moments[span.moments.size() == 2 ? 1 : 2];
  };
  const auto first = after(1, 1, 1);
  EXPECT_TRUE(at::equal(first, after(1, 1, 1)));
  EXPECT_FALSE(at::equal(first, after(2, 1, 1)));
  EXPECT_FALSE(at::equal(first, after(1, 2, 1)));
  EXPECT_FALSE(at::equal(first, after(1, 1, 2)));
}

INSTANTIATE_TEST_SUITE_P(Moments, Low,
                         testing::Combine(testing::Values("adamw", "adam"),
                                          testing::Values("bf16", "8bit")),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param);
                         });

}  // namespace
}  // namespace poise::optim
