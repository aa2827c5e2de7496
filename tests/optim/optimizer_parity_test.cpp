// 1,000 updates against a float64 reference written by hand: at most twice the error that torch's
// own fused fp32 kernels make on the same gradients.
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "poise/optim.h"

namespace poise::optim {
namespace {

constexpr std::int64_t kNumel = 251;
constexpr std::int64_t kUpdates = 1000;
constexpr double kFactor = 0.37;

struct Case {
  std::string name;
  config::OptimizerPolicy policy;
  at::ScalarType gradient;
  double lr = 1e-2;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Reproducible numbers in (-1, 1), different scales per element so that eps and moments matter.
double gradient_at(std::int64_t update, std::int64_t index) {
  const double wave =
      std::sin(0.7 * static_cast<double>(index) + 1.3 * static_cast<double>(update));
  const double noise = std::sin(12.9898 * static_cast<double>(index * 1009 + update)) * 43758.5453;
  const double scale = std::pow(10.0, -static_cast<double>(index % 5));
  return scale * (0.3 * wave + noise - std::floor(noise) - 0.4);
}

double norm_of(const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

// The published formulas, in float64.
struct Reference {
  std::vector<double> p, m, v;

  void update(const Case& c, std::int64_t t, const float* gradients) {
    const config::OptimizerPolicy& o = c.policy;
    const auto count = static_cast<std::int64_t>(p.size());
    std::vector<double> g(p.size());
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = kFactor * gradients[i];
    if (o.type == "lars") {
      const double weights = norm_of(p);
      const double rate = o.trust_coefficient * weights / (norm_of(g) + o.weight_decay * weights);
      for (std::size_t i = 0; i < g.size(); ++i) {
        m[i] = o.momentum * m[i] + c.lr * rate * (g[i] + o.weight_decay * p[i]);
        p[i] -= m[i];
      }
    } else if (o.type == "lamb") {
      std::vector<double> direction(p.size());
      for (std::size_t i = 0; i < g.size(); ++i) {
        m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
        v[i] = o.beta2 * v[i] + (1 - o.beta2) * g[i] * g[i];
        direction[i] = m[i] / (1 - std::pow(o.beta1, t)) /
                           (std::sqrt(v[i] / (1 - std::pow(o.beta2, t))) + o.eps) +
                       o.weight_decay * p[i];
      }
      double trust = norm_of(p) / norm_of(direction);
      if (o.max_trust > 0) trust = std::min(trust, o.max_trust);
      trust = std::max(trust, o.min_trust);
      for (std::size_t i = 0; i < g.size(); ++i) p[i] -= c.lr * trust * direction[i];
    } else {
      for (std::int64_t i = 0; i < count; ++i) update(c, t, i, gradients[i]);
    }
  }

  void update(const Case& c, std::int64_t t, std::int64_t i, double gradient) {
    double g = gradient * kFactor;
    const config::OptimizerPolicy& o = c.policy;
    if (o.type == "adamw") p[i] -= c.lr * o.weight_decay * p[i];
    if (o.type == "lion") {
      const double direction = o.beta1 * m[i] + (1 - o.beta1) * g;
      p[i] -= c.lr * ((direction > 0) - (direction < 0) + o.weight_decay * p[i]);
      m[i] = o.beta2 * m[i] + (1 - o.beta2) * g;
      return;
    }
    if (o.type != "adamw") g += o.weight_decay * p[i];
    if (o.type == "sgd") {
      m[i] = t == 1 ? g : o.momentum * m[i] + g;
      p[i] -= c.lr * (o.nesterov ? g + o.momentum * m[i] : m[i]);
      return;
    }
    m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
    v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
    const double corrected1 = m[i] / (1 - std::pow(o.beta1, t));
    const double corrected2 = v[i] / (1 - std::pow(o.beta2, t));
    p[i] -= c.lr * corrected1 / (std::sqrt(corrected2) + o.eps);
  }
};

// torch's own kernel on fp32 tensors; its operations, where it has no such optimizer.
struct Torch {
  at::Tensor p, m, v, step;

  void update(const Case& c, std::int64_t t, const at::Tensor& gradient) {
    const config::OptimizerPolicy& o = c.policy;
    const at::Tensor g = gradient.to(at::kFloat).mul(static_cast<float>(kFactor));
    step.fill_(static_cast<double>(t));
    if (o.type == "lars") {
      const double weights = p.norm().item<double>();
      const double rate =
          o.trust_coefficient * weights / (g.norm().item<double>() + o.weight_decay * weights);
      m.mul_(o.momentum).add_(g.add(p, o.weight_decay), c.lr * rate);
      p.sub_(m);
    } else if (o.type == "lamb") {
      m.mul_(o.beta1).add_(g, 1 - o.beta1);
      v.mul_(o.beta2).addcmul_(g, g, 1 - o.beta2);
      const double correction1 = 1 - std::pow(o.beta1, t), correction2 = 1 - std::pow(o.beta2, t);
      const at::Tensor direction =
          m.div(correction1).div_(v.div(correction2).sqrt_().add_(o.eps)).add_(p, o.weight_decay);
      double trust = p.norm().item<double>() / direction.norm().item<double>();
      if (o.max_trust > 0) trust = std::min(trust, o.max_trust);
      p.sub_(direction, c.lr * std::max(trust, o.min_trust));
    } else if (o.type == "lion") {
      const at::Tensor direction = m.mul(o.beta1).add_(g, 1 - o.beta1).sign_();
      p.mul_(1 - c.lr * o.weight_decay).sub_(direction, c.lr);
      m.mul_(o.beta2).add_(g, 1 - o.beta2);
    } else if (o.type == "sgd") {
      std::vector<at::Tensor> momentum;
      if (o.momentum != 0) momentum.push_back(m);
      at::_fused_sgd_({p}, {g}, momentum, o.weight_decay, o.momentum, c.lr, 0.0, o.nesterov, false,
                      t == 1);
    } else if (o.type == "adam") {
      at::_fused_adam_({p}, {g}, {m}, {v}, {}, {step}, c.lr, o.beta1, o.beta2, o.weight_decay,
                       o.eps, false, false);
    } else {
      at::_fused_adamw_({p}, {g}, {m}, {v}, {}, {step}, c.lr, o.beta1, o.beta2, o.weight_decay,
                        o.eps, false, false);
    }
  }
};

double error_of(const at::Tensor& p, const std::vector<double>& expected, std::int64_t offset) {
  double worst = 0;
  for (std::int64_t i = 0; i < kNumel; ++i) {
    const double actual = p.const_data_ptr<float>()[offset + i];
    worst = std::max(worst, std::abs(actual - expected[i]));
  }
  return worst;
}

// Torch's fused kernels start a parallel region for any size; a thread that waits only costs here.
class Parity : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_P(Parity, ErrorIsAtMostTwiceThatOfTorch) {
  const Case& c = GetParam();
  const auto optimizer = make_optimizer(c.policy);
  // Ours lives at an offset in a flat with padding around it.
  constexpr std::int64_t kOffset = 3;
  Span span;
  span.master = at::zeros({kNumel + 10}, at::kFloat);
  span.low = at::zeros({kNumel + 10}, at::kBFloat16);
  span.gradient = at::zeros({kNumel + 10}, c.gradient);
  for (int i = 0; i < optimizer->num_moments(); ++i) {
    span.moments.push_back(at::zeros({kNumel + 10}, at::kFloat));
  }
  span.segments = {{kOffset, kOffset + kNumel, 0}};
  span.parameters = {{{1, kNumel}, {kNumel, 1}}};
  Reference reference{std::vector<double>(kNumel), std::vector<double>(kNumel),
                      std::vector<double>(kNumel)};
  for (std::int64_t i = 0; i < kNumel; ++i) {
    const auto start = static_cast<float>(std::cos(static_cast<double>(i)));
    span.master.data_ptr<float>()[kOffset + i] = start;
    reference.p[i] = start;
  }
  const auto own = span.master.narrow(0, kOffset, kNumel);
  Torch torch{own.clone(), at::zeros({kNumel}, at::kFloat), at::zeros({kNumel}, at::kFloat),
              at::zeros({}, at::kFloat)};
  const std::vector<GroupSettings> groups = {{c.lr, c.policy.weight_decay}};
  at::Tensor wide = at::zeros({kNumel + 10}, at::kFloat);
  for (std::int64_t t = 1; t <= kUpdates; ++t) {
    for (std::int64_t i = 0; i < kNumel; ++i) {
      wide.data_ptr<float>()[kOffset + i] = static_cast<float>(gradient_at(t, i));
    }
    span.gradient.copy_(wide);
    const at::Tensor given = span.gradient.to(at::kFloat);  // what both really receive
    reference.update(c, t, given.const_data_ptr<float>() + kOffset);
    torch.update(c, t, given.narrow(0, kOffset, kNumel));
    span.sums.clear();
    for (int round = 0; round < optimizer->rounds(); ++round) {
      span.sums.push_back(optimizer->sums(round, span, groups, t, kFactor));
    }
    optimizer->apply(span, groups, t, kFactor);
    if (t == 1 || t == 10 || t == 100 || t == kUpdates) {
      const double ours = error_of(span.master, reference.p, kOffset);
      const double theirs = error_of(torch.p, reference.p, 0);
      // Half an ulp of 1 is where "twice" of an accidental zero would be unfair.
      EXPECT_LE(ours, std::max(2 * theirs, 6e-8)) << "update " << t;
      EXPECT_LE(ours, 1e-4) << "update " << t;
    }
  }
  EXPECT_GT(std::abs(reference.p[1] - std::cos(1.0)), 1e-3) << "nothing moved";
}

Case make(const std::string& name, const std::string& type, double decay, at::ScalarType dtype) {
  Case c{name, {}, dtype};
  c.policy.type = type;
  c.policy.weight_decay = decay;
  return c;
}

std::vector<Case> cases() {
  std::vector<Case> all = {
      make("adamw", "adamw", 0.1, at::kFloat),
      make("adamw_bf16_gradient", "adamw", 0.1, at::kBFloat16),
      make("adamw_fp16_gradient", "adamw", 0.0, at::kHalf),
      make("adam", "adam", 0.0, at::kFloat),
      make("adam_decay", "adam", 0.05, at::kFloat),
      make("sgd", "sgd", 0.01, at::kFloat),
      make("sgd_momentum", "sgd", 0.01, at::kFloat),
      make("sgd_nesterov", "sgd", 0.01, at::kBFloat16),
      make("adamw_small_betas", "adamw", 0.1, at::kFloat),
      make("lion", "lion", 0.1, at::kFloat),
      make("lion_bf16_gradient", "lion", 0.0, at::kBFloat16),
      make("lamb", "lamb", 0.1, at::kFloat),
      make("lamb_limited", "lamb", 0.0, at::kHalf),
      make("lars", "lars", 0.01, at::kFloat),
      make("lars_bf16_gradient", "lars", 0.0, at::kBFloat16),
  };
  all[6].policy.momentum = 0.9;
  all[7].policy.momentum = 0.95;
  all[7].policy.nesterov = true;
  all[8].policy.beta1 = 0.3;
  all[8].policy.beta2 = 0.4;
  all[9].policy.beta2 = 0.99;
  all[9].lr = all[10].lr = 1e-4;
  all[11].lr = all[12].lr = 1e-3;
  all[12].policy.max_trust = 0.3;
  all[13].policy.momentum = all[14].policy.momentum = 0.9;
  all[13].lr = all[14].lr = 0.1;
  return all;
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Parity, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace poise::optim
