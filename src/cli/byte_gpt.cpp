// The byte-level GPT on torch::nn.
#include "cli/byte_gpt.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <torch/utils.h>

#include <cmath>

#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::cli {
namespace {

using torch::nn::EmbeddingOptions;
using torch::nn::LayerNormOptions;
using torch::nn::LinearOptions;

torch::nn::LayerNorm norm(std::int64_t width) {
  return torch::nn::LayerNorm(LayerNormOptions({width}));
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The layer's own forward, but for selective recomputation, which keeps its output.
at::Tensor kept(const torch::nn::Linear& layer, const at::Tensor& x) {
  return checkpointing::kept_linear(x, layer->weight, layer->bias);
}

}  // namespace

ByteGptBlock::ByteGptBlock(const config::ModelPolicy& policy)
    : heads_(policy.heads),
      dropout_(policy.dropout),
      ln1_(norm(policy.width)),
      ln2_(norm(policy.width)),
      qkv_(policy.width, 3 * policy.width),
      proj_(policy.width, policy.width),
      fc_(policy.width, 4 * policy.width),
      out_(4 * policy.width, policy.width) {
  register_module("ln1", ln1_);
  register_module("qkv", qkv_);
  register_module("proj", proj_);
  register_module("ln2", ln2_);
  register_module("fc", fc_);
  register_module("out", out_);
}

at::Tensor ByteGptBlock::attention(const at::Tensor& x) {
  const auto batch = x.size(0), time = x.size(1), width = x.size(2);
  // [3, B, heads, T, width / heads]
  const auto qkv =
      kept(qkv_, x).view({batch, time, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const double dropout = is_training() ? dropout_ : 0.0;
  const auto mixed =
      dropout > 0
          ? at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, dropout,
                                             /*is_causal=*/true)
          : checkpointing::kept_attention(qkv[0], qkv[1], qkv[2], checkpointing::Mask::causal);
  return kept(proj_, mixed.transpose(1, 2).reshape({batch, time, width}));
}

at::Tensor ByteGptBlock::forward(const at::Tensor& x) {
  const auto y = x + at::dropout(attention(ln1_(x)), dropout_, is_training());
  const auto mlp = kept(out_, at::gelu(kept(fc_, ln2_(y)), "tanh"));
  return y + at::dropout(mlp, dropout_, is_training());
}

ByteGpt::ByteGpt(const config::ModelPolicy& policy, std::uint64_t seed)
    : policy_(policy),
      tok_(EmbeddingOptions(kVocabulary, policy.width)),
      pos_(EmbeddingOptions(policy.sequence_length, policy.width)),
      ln_(norm(policy.width)),
      head_(LinearOptions(policy.width, kVocabulary).bias(false)),
      recomputed_(static_cast<std::size_t>(policy.layers), false),
      units_(static_cast<std::size_t>(policy.layers)) {
  register_module("tok", tok_);
  register_module("pos", pos_);
  for (std::int64_t i = 0; i < policy.layers; ++i) {
    blocks_->push_back(std::make_shared<ByteGptBlock>(policy));
  }
  register_module("blocks", blocks_);
  register_module("ln", ln_);
  register_module("head", head_);
  initialise(seed);
}

// Radford et al. 2019 (GPT-2): normal 0.02, the projections onto the residual stream smaller by
// sqrt(2 x layers); biases 0, norms 1. One generator, parameters in order of registration.
void ByteGpt::initialise(std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(policy_.layers));
  for (auto& item : named_parameters()) {
    const auto& name = item.key();
    auto& parameter = item.value();
    if (ends_with(name, "bias")) {
      parameter.zero_();
    } else if (parameter.dim() == 1) {
      parameter.fill_(1);
    } else {
      const bool onto_residual = ends_with(name, "proj.weight") || ends_with(name, "out.weight");
      parameter.normal_(0, onto_residual ? residual : 0.02, generator);
    }
  }
}

std::vector<std::string> ByteGpt::units() const {
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < policy_.layers; ++i) names.push_back("blocks." + std::to_string(i));
  return names;
}

void ByteGpt::recompute(std::vector<bool> units, checkpointing::Options::Keep keep) {
  POISE_CHECK(units.size() == recomputed_.size(), units.size());
  recomputed_ = std::move(units);
  region_.keep = keep;
}

void ByteGpt::bind(const Engine& engine) {
  const auto names = units();
  // One block alone is no unit: it is among the rest, which is whole throughout.
  for (std::size_t i = 0; names.size() > 1 && i < names.size(); ++i) {
    units_[i] = engine.unit(names[i]);
  }
  const auto& chosen = engine.config().offload.activation_units;
  if (chosen.empty()) return;
  saves_away_ = checkpointing::matching_units(chosen, names);
  away_ = engine.activation_offload();
}

at::Tensor ByteGpt::hidden(const at::Tensor& bytes) {
  const auto time = bytes.size(1);
  if (time > policy_.sequence_length) {
    fail("cli", "byte_gpt got ", time, " bytes; it was built for model.sequence_length ",
         policy_.sequence_length);
  }
  const auto positions = at::arange(time, bytes.options());
  auto x = at::dropout(tok_(bytes) + pos_(positions), policy_.dropout, is_training());
  for (std::size_t i = 0; i < recomputed_.size(); ++i) {
    const auto block = blocks_->ptr<ByteGptBlock>(i);
    const auto run = [block](const at::Tensor& input) { return block->forward(input); };
    // The unit outside: what is recomputed needs no third gather.
    x = units_[i](
        [&](const at::Tensor& input) {
          const bool away = away_ && saves_away_[i] && at::GradMode::is_enabled();
          const auto scope = away ? away_->scope() : nullptr;
          return recomputed_[i] ? checkpointing::recompute(run, input, region_) : run(input);
        },
        x);
  }
  return ln_(x);
}

// fp32 also where no autocast would make it so: a sum over 256 classes is no place for 8 bits.
at::Tensor ByteGpt::forward(const at::Tensor& bytes) { return head_(hidden(bytes)).to(at::kFloat); }

Loss ByteGpt::loss(const data::Batch& batch) {
  const auto targets = batch.targets.reshape(-1);
  const auto count = static_cast<double>(targets.numel());
  if (policy_.loss_chunk_tokens > 0) {
    const auto rows = hidden(batch.inputs).reshape({-1, policy_.width});
    const auto sum = checkpointing::chunked_cross_entropy(rows, head_->weight, /*bias=*/{}, targets,
                                                          policy_.loss_chunk_tokens);
    return Loss::mean(sum.loss_sum / sum.counted, count);
  }
  const auto logits = forward(batch.inputs).reshape({-1, kVocabulary});
  return Loss::mean(at::cross_entropy_loss(logits, targets), count);
}

std::string ByteGpt::generate(const std::string& prompt, std::int64_t count, double temperature,
                              std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  const bool was_training = is_training();
  eval();
  auto generator = at::detail::createCPUGenerator(seed);
  std::string text = prompt.empty() ? "\n" : prompt;
  const auto start = text.size();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto window = std::min(text.size(), static_cast<std::size_t>(policy_.sequence_length));
    std::vector<std::int64_t> bytes;
    for (std::size_t at = text.size() - window; at < text.size(); ++at) {
      bytes.push_back(static_cast<unsigned char>(text[at]));
    }
    const auto input = at::tensor(bytes, at::kLong).to(head_->weight.device()).unsqueeze(0);
    const auto last = forward(input).select(1, -1).squeeze(0).to(at::kCPU);
    const auto next = temperature > 0
                          ? at::multinomial((last / temperature).softmax(0), 1, false, generator)
                          : last.argmax();
    text += static_cast<char>(next.item<std::int64_t>());
  }
  train(was_training);
  return text.substr(start);
}

}  // namespace poise::cli
