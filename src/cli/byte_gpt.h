// The demo's model: a decoder-only transformer over bytes. Its twin in Python is
// python/poise/models/byte_gpt.py: same names, same operations, same numbers from the same seed.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "poise/checkpointing.h"
#include "poise/config.h"
#include "poise/data.h"
#include "poise/engine.h"

namespace poise::cli {

// Pre-LN block: x + attention(ln1(x)), then x + mlp(ln2(x)).
class ByteGptBlock : public torch::nn::Module {
 public:
  explicit ByteGptBlock(const config::ModelPolicy& policy);
  at::Tensor forward(const at::Tensor& x);  // [B, T, width] -> the same

 private:
  at::Tensor attention(const at::Tensor& x);

  std::int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm ln1_, ln2_;
  torch::nn::Linear qkv_, proj_, fc_, out_;
};

class ByteGpt : public torch::nn::Module {
 public:
  static constexpr std::int64_t kVocabulary = 256;

  // Parameters are drawn from a generator of their own, seeded with `seed`.
  ByteGpt(const config::ModelPolicy& policy, std::uint64_t seed);

  // Names of the blocks in forward order, as checkpointing policies see them.
  std::vector<std::string> units() const;
  // One flag per block; selective recomputation keeps what is marked.
  void recompute(std::vector<bool> units,
                 checkpointing::Options::Keep keep = checkpointing::Options::Keep::nothing);

  // Where the engine shards parameters, the blocks run as its units.
  void bind(const Engine& engine);

  at::Tensor forward(const at::Tensor& bytes);  // int64 [B, T] -> fp32 logits [B, T, 256]
  Loss loss(const data::Batch& batch);          // mean cross-entropy over B x T bytes

  // `count` bytes that follow `prompt`; temperature 0 takes the likeliest byte each time.
  std::string generate(const std::string& prompt, std::int64_t count, double temperature,
                       std::uint64_t seed);

 private:
  at::Tensor hidden(const at::Tensor& bytes);
  void initialise(std::uint64_t seed);

  config::ModelPolicy policy_;
  torch::nn::Embedding tok_, pos_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_;
  torch::nn::Linear head_;
  std::vector<bool> recomputed_;
  std::vector<zero::Unit> units_;  // of the blocks
  std::optional<checkpointing::ActivationOffload> away_;
  std::vector<bool> saves_away_;   // with away_: by block
  checkpointing::Options region_;  // of a recomputed block
};

}  // namespace poise::cli
