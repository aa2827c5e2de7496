// A small language model over plain leaf tensors with every kind of parameter that sharding has to
// get right, and the plain training of it: torch's autograd and an optimizer written out, in any
// dtype.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/stack.h>

#include <map>
#include <optional>
#include <set>

#include "support/tiny_model.h"

namespace poise::test {

// Tied (embedding and head), frozen, empty, 0-dim, one element, transposed, bf16 among fp32,
// unused.
struct GridModel {
  static constexpr std::int64_t kVocabulary = 11, kWidth = 8;
  static constexpr int kBlocks = 2;
  struct Block {
    at::Tensor norm, weight, bias, scale, frozen, empty;
  };
  at::Tensor embedding = normal({kVocabulary, kWidth}, 21, 0.4);
  std::vector<Block> blocks;
  at::Tensor unused = normal({3}, 22);
  std::vector<zero::Unit> units = std::vector<zero::Unit>(kBlocks);  // bound to an engine or not
  std::set<std::string> frozen{"blocks.0.frozen", "blocks.1.frozen"};

  explicit GridModel(at::ScalarType dtype = at::kFloat) {
    for (int i = 0; i < kBlocks; ++i) {
      const auto seed = static_cast<std::uint64_t>(30 + 10 * i);
      Block block;
      block.norm = normal({kWidth}, seed, 0.1) + 1;
      block.weight = normal({kWidth, kWidth}, seed + 1, 0.4);
      if (i == 1) block.weight = block.weight.t();
      block.bias = normal({kWidth}, seed + 2, 0.1).to(at::kBFloat16);
      block.scale = normal({}, seed + 3, 0.2) + 0.7;
      block.frozen = normal({kWidth}, seed + 4, 0.2) + 1;
      block.empty = at::empty({0, 4}, at::kFloat);
      blocks.push_back(block);
    }
    for (auto& [name, tensor] : slots()) {
      *tensor = tensor->detach().to(dtype == at::kFloat ? tensor->scalar_type() : dtype);
      tensor->set_requires_grad(frozen.count(name) == 0);
    }
  }

  // In order of names() below: the tied head comes again under its own name in view().
  std::vector<std::pair<std::string, at::Tensor*>> slots() {
    std::vector<std::pair<std::string, at::Tensor*>> all{{"embedding", &embedding}};
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const auto prefix = "blocks." + std::to_string(i) + ".";
      auto& b = blocks[i];
      for (auto [name, slot] : {std::pair{"norm", &b.norm},
                                {"weight", &b.weight},
                                {"bias", &b.bias},
                                {"scale", &b.scale},
                                {"frozen", &b.frozen},
                                {"empty", &b.empty}}) {
        all.emplace_back(prefix + name, slot);
      }
    }
    all.emplace_back("unused", &unused);
    return all;
  }

  ModelView view() {
    ModelView made;
    for (int i = 0; i < kBlocks; ++i) made.units.push_back({"blocks." + std::to_string(i), {}});
    for (auto& [name, tensor] : slots()) {
      made.parameters.push_back({name, *tensor});
      if (name.rfind("blocks.", 0) == 0) {
        made.units[static_cast<std::size_t>(name[7] - '0')].parameters.push_back(name);
      }
    }
    made.parameters.push_back({"head", embedding});
    return made;
  }

  static at::Tensor forward(const Block& b, const at::Tensor& x) {
    const auto type = x.scalar_type();
    auto h = at::layer_norm(x, {kWidth}, b.norm.to(type)) * b.frozen.to(type);
    h = at::gelu(at::linear(h, b.weight.to(type), b.bias.to(type)));
    return x + (h * b.scale.to(h.scalar_type())).to(type);
  }

  void bind(const Engine& engine) {
    for (std::size_t i = 0; i < units.size(); ++i) units[i] = engine.unit(join("blocks.", i));
  }

  // Sum over tokens of the loss of predicting the next one. tokens [rows, length].
  at::Tensor loss_sum(const at::Tensor& tokens) const {
    auto x = at::embedding(embedding, tokens.slice(1, 0, -1));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      x = units[i]([&](const at::Tensor& input) { return forward(blocks[i], input); }, x);
    }
    const auto logits = at::linear(x, embedding).flatten(0, 1);
    const auto wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
    return at::cross_entropy_loss(wide, tokens.slice(1, 1).flatten(), {}, at::Reduction::Sum, -100,
                                  0.0);
  }
};

inline at::Tensor make_tokens(std::int64_t rows, std::uint64_t seed, std::int64_t length = 6) {
  return at::empty({rows, length}, at::kLong).random_(0, GridModel::kVocabulary, generator(seed));
}
inline double counted(const at::Tensor& tokens) {
  return static_cast<double>(tokens.size(0) * (tokens.size(1) - 1));
}

// "adamw", "sgd" (with momentum), ...; "adamw_bf16", "adamw_8bit": its moments in those.
inline void set_type(config::OptimizerPolicy& policy, const std::string& name) {
  const auto cut = name.find('_');
  policy.type = name.substr(0, cut);
  if (cut != std::string::npos) policy.moments = name.substr(cut + 1);
  if (policy.type == "sgd" || policy.type == "lars") policy.momentum = 0.9;
}

// The training in plain torch: gradients of every micro-batch added up in the parameters' dtype,
// divided by the tokens, clipped; the optimizers written out.
class PlainTraining {
 public:
  // `dtype` of optimizer and masters; `forward` a 16-bit type for autocast, or `dtype`;
  // `parameters` of the copies that forward reads.
  PlainTraining(at::ScalarType dtype, at::ScalarType forward, config::OptimizerPolicy policy,
                std::optional<at::ScalarType> parameters = {})
      : model(dtype),
        dtype_(dtype),
        forward_(forward),
        parameters_(parameters.value_or(dtype)),
        policy_(std::move(policy)) {
    for (auto& [name, tensor] : model.slots()) {
      *tensor = tensor->detach().to(dtype).requires_grad_(model.frozen.count(name) == 0);
    }
    if (parameters_ != dtype_) scaling_ = 256;
  }

  double step(const std::vector<at::Tensor>& window, double lr) {
    double tokens = 0, loss = 0;
    std::map<std::string, at::Tensor> sums;
    auto slots = model.slots();
    GridModel copy = model;
    GridModel& read = parameters_ == dtype_ ? model : copy;
    if (parameters_ != dtype_) {
      for (auto& [name, tensor] : copy.slots()) {
        const bool trains = tensor->requires_grad();
        *tensor = tensor->detach().to(parameters_).requires_grad_(trains);
      }
    }
    auto read_slots = read.slots();
    for (const auto& batch : window) {
      const auto value = forward(read, batch);
      loss += value.item<double>();
      tokens += counted(batch);
      std::vector<at::Tensor> inputs;
      for (auto& [name, tensor] : read_slots) inputs.push_back(*tensor);
      std::vector<at::Tensor> trainable;
      for (const auto& t : inputs)
        if (t.requires_grad()) trainable.push_back(t);
      const auto gradients =
          torch::autograd::grad({value * scaling_}, trainable, {}, {}, false, true);
      std::size_t next = 0;
      for (auto& [name, tensor] : slots) {
        if (!tensor->requires_grad()) continue;
        const auto& g = gradients[next++];
        if (!g.defined()) continue;
        auto& sum = sums[name];
        const auto wide = g.to(dtype_).div(scaling_);
        sum = sum.defined() ? sum + wide : wide;
      }
    }
    at::NoGradGuard no_grad;
    double squares = 0;
    for (auto& [name, sum] : sums) {
      sum = sum / tokens;
      squares += sum.to(at::kDouble).pow(2).sum().item<double>();
    }
    const double limit = policy_.max_grad_norm;
    const double clip = limit > 0 ? std::min(1.0, limit / (std::sqrt(squares) + 1e-6)) : 1.0;
    ++updates_;
    for (auto& [name, tensor] : slots) {
      if (!tensor->requires_grad()) continue;
      update(name, *tensor, sums[name].defined() ? sums[name] * clip : at::zeros_like(*tensor), lr);
    }
    return loss / tokens;
  }

  GridModel model;

 private:
  at::Tensor forward(const GridModel& read, const at::Tensor& batch) const {
    if (forward_ == dtype_) return read.loss_sum(batch);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, forward_);
    at::autocast::set_autocast_cache_enabled(false);
    auto value = read.loss_sum(batch);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return value;
  }

  static double length(const at::Tensor& values) {
    return std::sqrt(values.to(at::kDouble).pow(2).sum().item<double>());
  }

  void update(const std::string& name, at::Tensor& value, const at::Tensor& g, double lr) {
    auto& [m, v] = moments_[name];
    if (!m.defined()) m = at::zeros_like(value), v = at::zeros_like(value);
    const double decay = value.dim() >= 2 ? policy_.weight_decay : 0;
    if (policy_.type == "sgd") {
      m.mul_(policy_.momentum).add_(g).add_(value, decay);
      value.sub_(m, lr);
      return;
    }
    if (policy_.type == "lars") {
      const double weights = length(value), sum = length(g) + decay * weights;
      const bool adapts = value.dim() >= 2 && weights > 0 && sum > 0;
      const double rate = adapts ? lr * policy_.trust_coefficient * weights / sum : lr;
      m.mul_(policy_.momentum).add_(g + value * decay, rate);
      value.sub_(m);
      return;
    }
    if (policy_.type == "lion") {
      const auto direction = (m * policy_.beta1 + g * (1 - policy_.beta1)).sign();
      value.mul_(1 - lr * decay).sub_(direction, lr);
      m.mul_(policy_.beta2).add_(g, 1 - policy_.beta2);
      return;
    }
    m.mul_(policy_.beta1).add_(g, 1 - policy_.beta1);
    v.mul_(policy_.beta2).addcmul_(g, g, 1 - policy_.beta2);
    const auto m_hat = m / (1 - std::pow(policy_.beta1, updates_));
    const auto v_hat = v / (1 - std::pow(policy_.beta2, updates_));
    if (policy_.type == "lamb") {
      const auto step = m_hat / (v_hat.sqrt() + policy_.eps) + value * decay;
      const double weights = length(value), direction = length(step);
      double trust = weights > 0 && direction > 0 ? weights / direction : 1;
      if (policy_.max_trust > 0) trust = std::min(trust, policy_.max_trust);
      value.sub_(step, lr * std::max(trust, policy_.min_trust));
      return;
    }
    value.mul_(1 - lr * decay).sub_(m_hat / (v_hat.sqrt() + policy_.eps) * lr);
  }

  at::ScalarType dtype_, forward_, parameters_;
  double scaling_ = 1;  // of the loss, so that 16-bit gradients do not underflow
  config::OptimizerPolicy policy_;
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> moments_;
  int updates_ = 0;
};

// Values of the parameters by name.
using Values = std::map<std::string, at::Tensor>;
inline Values values_of(GridModel& model) {
  Values values;
  for (auto& [name, tensor] : model.slots()) values[name] = tensor->detach().clone();
  return values;
}

// The same of an engine's model, at any stage; all ranks.
inline Values values_of(Engine& engine, GridModel& model) {
  const auto whole = engine.gathered();
  return values_of(model);
}

// Root mean square of the difference over all elements.
inline double rms_difference(const Values& a, const Values& b) {
  double squares = 0, count = 0;
  for (const auto& [name, value] : a) {
    const auto difference = value.to(at::kDouble) - b.at(name).to(at::kDouble);
    squares += difference.pow(2).sum().item<double>();
    count += static_cast<double>(value.numel());
  }
  return std::sqrt(squares / count);
}

// Name of the first parameter whose bits differ; empty where all are equal.
inline std::string first_difference(const Values& a, const Values& b) {
  for (const auto& [name, value] : a) {
    const auto& other = b.at(name);
    if (value.scalar_type() != other.scalar_type() || !at::equal(value, other)) return name;
  }
  return "";
}

}  // namespace poise::test
