// Adafactor over one flat of parameters of all kinds of shapes, against its formula in float64 on
// tensors of torch: at most twice the error that the same formula has in fp32.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "poise/error.h"
#include "poise/optim.h"
#include "support/tiny_model.h"

namespace poise::optim {
namespace {

using at::Tensor;

// transformers' Adafactor without momentum and relative steps, as it is written there.
struct Formula {
  config::OptimizerPolicy policy;
  std::vector<Tensor> values, rows, columns;

  Formula(const config::OptimizerPolicy& given, const std::vector<Tensor>& start,
          at::ScalarType dtype)
      : policy(given) {
    for (const auto& tensor : start) {
      values.push_back(tensor.to(dtype, false, true));
      const bool factored = tensor.dim() >= 2 && tensor.numel() > 0;
      rows.push_back(at::zeros_like(factored ? values.back().sum(-1) : values.back()));
      columns.push_back(factored ? at::zeros_like(values.back().sum(-2)) : Tensor());
    }
  }

  void update(std::size_t p, std::int64_t step, double lr, double decay, const Tensor& gradient) {
    auto& value = values[p];
    if (value.numel() == 0) return;
    const auto g = gradient.to(value.scalar_type());
    const double beta2 = 1 - std::pow(static_cast<double>(step), policy.decay_rate);
    const auto rms = [](const Tensor& t) {
      return t.norm().item<double>() / std::sqrt(static_cast<double>(t.numel()));
    };
    if (policy.scale_parameter) lr *= std::max(policy.eps_scale, rms(value));
    const auto squares = g * g + policy.eps_square;
    Tensor step_taken;
    if (columns[p].defined()) {
      rows[p].mul_(beta2).add_(squares.mean(-1), 1 - beta2);
      columns[p].mul_(beta2).add_(squares.mean(-2), 1 - beta2);
      const auto row = (rows[p] / rows[p].mean(-1, true)).rsqrt().unsqueeze(-1);
      step_taken = row * columns[p].unsqueeze(-2).rsqrt() * g;
    } else {
      rows[p].mul_(beta2).add_(squares, 1 - beta2);
      step_taken = rows[p].rsqrt() * g;
    }
    step_taken = step_taken / std::max(1.0, rms(step_taken) / policy.clip_threshold) * lr;
    value.sub_(value * (decay * lr)).sub_(step_taken);
  }
};

// Contiguous, transposed, of four dimensions with channels last, of one, none, empty, one row.
std::vector<Tensor> shapes() {
  std::vector<Tensor> all;
  all.push_back(test::normal({12, 20}, 1));
  all.push_back(test::normal({20, 33}, 2).t());
  all.push_back(test::normal({3, 4, 5, 2}, 3).permute({0, 3, 1, 2}));
  all.push_back(test::normal({17}, 4));
  all.push_back(test::normal({}, 5));
  all.push_back(at::zeros({0, 4}, at::kFloat));
  all.push_back(test::normal({1, 300}, 6, 0.1));
  all.push_back(test::normal({300, 200}, 7, 0.02));  // more than one chunk of sums
  return all;
}

struct Flat {
  Span span;
  std::vector<Tensor> values, gradients;  // of the parameters: views of the span's

  Flat(const Optimizer& optimizer, const std::vector<Tensor>& start) {
    std::int64_t numel = 0, factored = 0;
    std::vector<std::int64_t> begins;
    for (std::size_t p = 0; p < start.size(); ++p) {
      const auto& tensor = start[p];
      begins.push_back(numel);
      span.parameters.push_back({tensor.sizes().vec(), tensor.strides().vec()});
      Segment segment{numel, numel + tensor.numel(), tensor.dim() >= 2 ? 0 : 1};
      segment.index = static_cast<int>(p);
      if (tensor.numel() > 0) span.segments.push_back(segment);
      numel += (tensor.numel() + 255) / 256 * 256;
      factored += factored_numel(span.parameters.back());
    }
    span.master = at::zeros({numel}, at::kFloat);
    span.gradient = at::zeros({numel}, at::kFloat);
    span.low = at::zeros({numel}, at::kBFloat16);
    EXPECT_EQ(optimizer.moments().size(), 1u);
    span.moments = {at::zeros({factored}, at::kFloat)};
    for (std::size_t p = 0; p < start.size(); ++p) {
      const auto view = [&, p = p](const Tensor& flat) {
        return flat.narrow(0, begins[p], std::max<std::int64_t>(start[p].numel(), 1))
            .as_strided(start[p].sizes(), start[p].strides());
      };
      values.push_back(view(span.master));
      gradients.push_back(view(span.gradient));
      values.back().copy_(start[p]);
    }
  }

  void update(const Optimizer& optimizer, const std::vector<GroupSettings>& groups,
              std::int64_t step, double factor) {
    span.sums.clear();
    for (int round = 0; round < optimizer.rounds(); ++round) {
      span.sums.push_back(optimizer.sums(round, span, groups, step, factor));
    }
    optimizer.apply(span, groups, step, factor);
  }
};

class Factored : public testing::TestWithParam<bool> {};

TEST_P(Factored, ErrorIsAtMostTwiceThatOfFp32) {
  config::OptimizerPolicy policy;
  policy.type = "adafactor";
  policy.scale_parameter = GetParam();
  const auto optimizer = make_optimizer(policy);
  const auto start = shapes();
  Flat flat(*optimizer, start);
  Formula exact(policy, start, at::kDouble), plain(policy, start, at::kFloat);
  const std::vector<GroupSettings> groups{{1e-2, 0.1}, {1e-2, 0}};
  constexpr double kFactor = 0.25;
  for (std::int64_t step = 1; step <= 100; ++step) {
    for (std::size_t p = 0; p < start.size(); ++p) {
      const auto seed = static_cast<std::uint64_t>(1000 * step) + p;
      const auto drawn = test::normal(start[p].sizes(), seed, std::pow(10.0, -(step % 3)));
      flat.gradients[p].copy_(drawn);
      const double decay = groups[start[p].dim() >= 2 ? 0 : 1].weight_decay;
      exact.update(p, step, 1e-2, decay, drawn.to(at::kDouble) * kFactor);
      plain.update(p, step, 1e-2, decay, drawn * kFactor);
    }
    flat.update(*optimizer, groups, step, kFactor);
    if (step != 1 && step != 10 && step != 100) continue;
    for (std::size_t p = 0; p < start.size(); ++p) {
      if (start[p].numel() == 0) continue;
      const auto error = [&](const Tensor& value) {
        return (value.to(at::kDouble) - exact.values[p]).abs().max().item<double>();
      };
      EXPECT_LE(error(flat.values[p]), std::max(2 * error(plain.values[p]), 1.2e-7))
          << "parameter " << p << " update " << step;
      EXPECT_TRUE((exact.values[p] - start[p]).abs().max().item<double>() > 1e-5) << p;
    }
  }
  EXPECT_TRUE(at::equal(flat.span.low, flat.span.master.to(at::kBFloat16)));
  EXPECT_EQ(flat.span.master.narrow(0, 240, 16).abs().sum().item<float>(), 0) << "padding";
}

INSTANTIATE_TEST_SUITE_P(Scale, Factored, testing::Bool(), [](const auto& info) {
  return info.param ? "of_the_parameter" : "of_the_rate";
});

// Pieces of a parameter, cut anywhere in a row, add up to its sums.
TEST(Adafactor, PiecesAddUp) {
  config::OptimizerPolicy policy;
  policy.type = "adafactor";
  const auto optimizer = make_optimizer(policy);
  const auto start = shapes();
  Flat flat(*optimizer, start);
  for (std::size_t p = 0; p < start.size(); ++p) {
    flat.gradients[p].copy_(test::normal(start[p].sizes(), 50 + p));
  }
  const std::vector<GroupSettings> groups(2);
  const auto whole = optimizer->sums(0, flat.span, groups, 1, 1);
  const auto segments = flat.span.segments;
  Tensor total = at::zeros_like(whole);
  for (const bool front : {true, false}) {
    flat.span.segments.clear();
    for (auto segment : segments) {
      const auto cut = segment.begin + (segment.end - segment.begin) * 2 / 5;
      if (front) {
        segment.end = cut;
      } else {
        segment.first += cut - segment.begin;
        segment.begin = cut;
      }
      flat.span.segments.push_back(segment);
    }
    total += optimizer->sums(0, flat.span, groups, 1, 1);
  }
  EXPECT_LE((total - whole).abs().max().item<double>(), 1e-12 * whole.max().item<double>());
  std::int64_t begin = 0;
  for (std::size_t p = 0; p < start.size(); ++p) {
    const auto count = factored_numel(flat.span.parameters[p]);
    const auto squares = flat.gradients[p].to(at::kDouble).pow(2);
    if (start[p].dim() >= 2 && start[p].numel() > 0) {
      const auto rows = squares.sum(-1).flatten(), columns = squares.sum(-2).flatten();
      const auto mine = whole.narrow(0, begin, count);
      EXPECT_LE((mine.narrow(0, 0, rows.numel()) - rows).abs().max().item<double>(), 1e-11) << p;
      EXPECT_LE(
          (mine.narrow(0, rows.numel(), columns.numel()) - columns).abs().max().item<double>(),
          1e-11)
          << p;
    }
    begin += count;
  }
}

TEST(Adafactor, KeepsRowsAndColumnsAlone) {
  EXPECT_EQ(factored_numel({{300, 200}, {200, 1}}), 500);
  EXPECT_EQ(factored_numel({{2, 3, 4}, {12, 4, 1}}), 2 * 3 + 2 * 4);
  EXPECT_EQ(factored_numel({{17}, {1}}), 17);
  EXPECT_EQ(factored_numel({{}, {}}), 1);
  EXPECT_EQ(factored_numel({{0, 4}, {4, 1}}), 0);
}

}  // namespace
}  // namespace poise::optim
