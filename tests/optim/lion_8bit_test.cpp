// Lion's momentum in 8 bits: the update against float64 from the same momentum, what rounding keeps
// on average, and that shards change no bit.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "poise/error.h"
#include "poise/optim.h"

namespace poise::optim {
namespace {

constexpr std::int64_t kNumel = 1024;
const std::vector<GroupSettings> kGroups = {{1e-2, 0.1}};

std::unique_ptr<Optimizer> make(std::uint64_t seed) {
  config::OptimizerPolicy policy;
  policy.type = "lion";
  policy.moments = "8bit";
  policy.beta2 = 0.99;
  return make_optimizer(policy, seed);
}

Span span_of(const Optimizer& optimizer, std::int64_t numel, std::int64_t end) {
  Span span;
  span.master = at::zeros({numel}, at::kFloat);
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
    const double scale = std::pow(10.0, -static_cast<double>(i % 4));
    tensor.data_ptr<float>()[i] =
        static_cast<float>(scale * std::sin(phase + 1.7 * static_cast<double>(i)));
  }
}

// By the levels' definition: decades from 1e-7 to 1 with 1, 2, 4, ... 64 levels.
double momentum_at(const Span& span, std::int64_t i) {
  const int code = span.moments[0].data_ptr<std::uint8_t>()[i], magnitude = code & 127;
  int d = 0;
  while (d < 6 && magnitude > (1 << (d + 1)) - 1) ++d;
  const double begin = d == 0 ? 0 : std::pow(10.0, d - 7), end = std::pow(10.0, d - 6);
  const double level = begin + (end - begin) * (magnitude - ((1 << d) - 1)) / (1 << d);
  return (code & 128 ? -1 : 1) * level * span.moments[1].data_ptr<float>()[i / 256];
}

TEST(Lion8Bit, UpdatesAsFloat64DoesFromTheSameMomentum) {
  const auto optimizer = make(3);
  EXPECT_EQ(optimizer->name(), "lion_8bit");
  constexpr std::int64_t kEnd = kNumel - 300;  // the last block is cut short
  auto span = span_of(*optimizer, kNumel, kEnd);
  fill(span.master, 0.3);
  for (int t = 1; t <= 20; ++t) {
    fill(span.gradient, t);
    const at::Tensor before = span.master.clone();
    std::vector<double> old;
    for (std::int64_t i = 0; i < kEnd; ++i) old.push_back(momentum_at(span, i));
    optimizer->apply(span, kGroups, t, 0.5);
    for (std::int64_t block = 0; block < kEnd; block += 256) {
      const auto end = std::min(block + 256, kEnd);
      std::vector<double> want;
      double largest = 0;
      for (std::int64_t i = block; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double g = 0.5 * span.gradient[i].item<double>();
        const double blend = 0.9 * old[at] + 0.1 * g;
        want.push_back(0.99 * old[at] + 0.01 * g);
        largest = std::max(largest, std::abs(want.back()));
        if (std::abs(blend) < 1e-8) continue;  // its sign is a matter of rounding
        const double p = before[i].item<double>() * (1 - 1e-2 * 0.1);
        ASSERT_NEAR(span.master[i].item<double>(), p - std::copysign(1e-2, blend), 1e-6) << i;
      }
      ASSERT_NEAR(span.moments[1][block / 256].item<double>(), largest, 1e-6 * largest);
      for (std::int64_t i = block; i < end; ++i) {  // to either level beside it
        const double error = momentum_at(span, i) - want[static_cast<std::size_t>(i - block)];
        ASSERT_LE(std::abs(error), 0.9 / 64 * largest * 1.001) << t << " " << i;
      }
    }
  }
  for (std::int64_t i = kEnd; i < kNumel; ++i) {
    EXPECT_EQ(span.master[i].item<float>() * 0, 0) << "padding";
    EXPECT_EQ(span.moments[0][i].item<int>(), 0) << "padding";
  }
}

// Without a gradient a momentum is 0.99 of itself after each update: where levels are more than
// that apart, one that is rounded to nearest stays for ever.
TEST(Lion8Bit, SlowDecayIsKeptOnAverage) {
  const auto optimizer = make(5);
  constexpr std::int64_t kMany = 65536;
  auto span = span_of(*optimizer, kMany, kMany);
  for (std::int64_t i = 0; i < kMany; ++i) {  // one of each block is four times as large
    span.gradient.data_ptr<float>()[i] = i % 256 == 0 ? 4.0f : i % 2 == 0 ? 1.0f : -1.0f;
  }
  optimizer->apply(span, {{0, 0}}, 1, 1);
  const auto mean = [&] {
    double sum = 0;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < kMany; ++i) {
      if (i % 256 == 0) continue;
      sum += (i % 2 == 0 ? 1 : -1) * momentum_at(span, i);
      ++count;
    }
    return sum / static_cast<double>(count);
  };
  const double start = mean();
  EXPECT_NEAR(start, 0.01, 2e-3 * 0.01);
  span.gradient.zero_();
  for (int t = 2; t <= 51; ++t) optimizer->apply(span, {{0, 0}}, t, 1);
  const double want = start * std::pow(0.99, 50);
  EXPECT_NEAR(mean(), want, 1e-2 * want);
  EXPECT_LT(want, 0.61 * start);
}

// A parameter cut over two shards, at another place of the flat.
TEST(Lion8Bit, ShardsAndPlacesChangeNoBit) {
  const auto optimizer = make(11);
  auto whole = span_of(*optimizer, kNumel, kNumel - 10);
  fill(whole.master, 0.1);
  std::vector<Span> shards;
  for (const std::int64_t begin : {0, 512}) {
    auto shard = span_of(*optimizer, kNumel, 0);
    Segment part{256, begin == 0 ? 768 : 758};
    part.first = begin;
    part.parameter = 99;
    shard.segments = {part};
    shard.master.narrow(0, 256, 512).copy_(whole.master.narrow(0, begin, 512));
    shards.push_back(shard);
  }
  for (int t = 1; t <= 5; ++t) {
    fill(whole.gradient, t);
    optimizer->apply(whole, kGroups, t, 0.5);
    for (std::size_t s = 0; s < 2; ++s) {
      const auto begin = static_cast<std::int64_t>(512 * s),
                 count = std::int64_t{s == 0 ? 512 : 502};
      auto& shard = shards[s];
      shard.gradient.narrow(0, 256, 512).copy_(whole.gradient.narrow(0, begin, 512));
      optimizer->apply(shard, kGroups, t, 0.5);
      EXPECT_TRUE(
          at::equal(shard.master.narrow(0, 256, count), whole.master.narrow(0, begin, count)));
      for (std::size_t m = 0; m < 2; ++m) {
        const auto block = optimizer->moments()[m].block;
        EXPECT_TRUE(at::equal(shard.moments[m].narrow(0, 256 / block, 512 / block),
                              whole.moments[m].narrow(0, begin / block, 512 / block)))
            << "moment " << m << " shard " << s;
      }
    }
  }
}

}  // namespace
}  // namespace poise::optim
