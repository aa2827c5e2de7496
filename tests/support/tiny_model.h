// A small classifier over plain leaf tensors (no torch::nn: its headers are slow to compile), and a
// float64 reference of its training with torch's autograd and AdamW written out.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <vector>

#include "poise/engine.h"

namespace poise::test {

inline at::Generator generator(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

inline at::Tensor normal(at::IntArrayRef sizes, std::uint64_t seed, double std = 1.0) {
  return at::empty(sizes, at::kFloat).normal_(0, std, generator(seed));
}

struct TinyModel {
  static constexpr std::int64_t kIn = 6, kHidden = 10, kClasses = 5;
  at::Tensor w1 = normal({kHidden, kIn}, 1, 0.5);
  at::Tensor b1 = normal({kHidden}, 2, 0.1);
  at::Tensor w2 = normal({kClasses, kHidden}, 3, 0.5);
  at::Tensor b2 = normal({kClasses}, 4, 0.1);

  TinyModel() {
    for (auto* p : {&w1, &b1, &w2, &b2}) p->requires_grad_();
  }
  std::vector<NamedTensor> named() const {
    return {{"l1.weight", w1}, {"l1.bias", b1}, {"l2.weight", w2}, {"l2.bias", b2}};
  }
  ModelView view() const {
    return {named(), {}, {{"l1", {"l1.weight", "l1.bias"}}, {"l2", {"l2.weight", "l2.bias"}}}};
  }
  at::Tensor logits(const at::Tensor& x) const {
    return at::linear(at::gelu(at::linear(x.to(w1.scalar_type()), w1, b1)), w2, b2);
  }
};

// Rows of input with class targets; -100 rows are masked out.
struct Batch {
  at::Tensor x;
  at::Tensor y;
  double counted() const { return y.ne(-100).sum().item<double>(); }
};

inline Batch make_batch(std::int64_t rows, std::uint64_t seed, std::int64_t masked = 0) {
  Batch batch{normal({rows, TinyModel::kIn}, seed),
              at::empty({rows}, at::kLong).random_(0, TinyModel::kClasses, generator(seed + 1000))};
  if (masked > 0) batch.y.narrow(0, 0, masked).fill_(-100);
  return batch;
}

inline at::Tensor mean_loss(const TinyModel& model, const Batch& batch) {
  return at::cross_entropy_loss(model.logits(batch.x), batch.y, {}, at::Reduction::Mean, -100, 0.0);
}

// The same training in float64: the mean over all counted rows of the window, clip, AdamW.
class Reference {
 public:
  Reference(const TinyModel& model, const config::OptimizerPolicy& policy) : policy_(policy) {
    for (const auto& named : model.named()) {
      values_.push_back(named.tensor.detach().to(at::kDouble).requires_grad_());
      m_.push_back(at::zeros_like(values_.back().detach()));
      v_.push_back(at::zeros_like(values_.back().detach()));
    }
  }
  struct Result {
    double loss, norm;
  };
  Result step(const std::vector<Batch>& window, double lr) {
    double tokens = 0;
    at::Tensor total = at::zeros({}, at::kDouble);
    for (const auto& batch : window) {
      const auto h = at::gelu(at::linear(batch.x.to(at::kDouble), values_[0], values_[1]));
      total = total + at::cross_entropy_loss(at::linear(h, values_[2], values_[3]), batch.y, {},
                                             at::Reduction::Sum, -100, 0.0);
      tokens += batch.counted();
    }
    const auto loss = total / tokens;
    const auto gradients = torch::autograd::grad({loss}, {values_.begin(), values_.end()});
    double squares = 0;
    for (const auto& g : gradients) squares += g.pow(2).sum().item<double>();
    const double norm = std::sqrt(squares);
    const double limit = policy_.max_grad_norm;
    const double clip = limit > 0 ? std::min(1.0, limit / (norm + 1e-6)) : 1.0;
    ++updates_;
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      const auto g = gradients[i] * clip;
      const double decay = values_[i].dim() >= 2 ? policy_.weight_decay : 0;
      m_[i].mul_(policy_.beta1).add_(g, 1 - policy_.beta1);
      v_[i].mul_(policy_.beta2).addcmul_(g, g, 1 - policy_.beta2);
      const auto m_hat = m_[i] / (1 - std::pow(policy_.beta1, updates_));
      const auto v_hat = v_[i] / (1 - std::pow(policy_.beta2, updates_));
      values_[i].mul_(1 - lr * decay).sub_(m_hat / (v_hat.sqrt() + policy_.eps) * lr);
    }
    return {loss.item<double>(), norm};
  }
  const std::vector<at::Tensor>& values() const { return values_; }

 private:
  config::OptimizerPolicy policy_;
  std::vector<at::Tensor> values_, m_, v_;
  int updates_ = 0;
};

inline double largest_error(const TinyModel& model, const Reference& reference) {
  double worst = 0;
  for (std::size_t i = 0; i < reference.values().size(); ++i) {
    const auto got = model.named()[i].tensor.detach().to(at::kDouble);
    worst = std::max(worst, (got - reference.values()[i].detach()).abs().max().item<double>());
  }
  return worst;
}

}  // namespace poise::test
