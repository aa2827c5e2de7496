// What one block or head takes, operation by operation.
#pragma once

#include <functional>

#include "poise/plan.h"

namespace poise::plan {

// Sizes that all operations of a model share.
struct Sizes {
  std::int64_t tokens = 0;  // micro-batch x sequence
  std::int64_t sequence = 0;
  std::int64_t e = 4;           // bytes of an activation
  std::int64_t residual_e = 4;  // of one of the residual stream: fp32 under autocast
  std::int64_t weight_e = 4;    // bytes of a weight's gradient as backward makes it
  std::int64_t width = 0, query = 0, kv = 0, ffn = 0, heads = 0, vocabulary = 0;
  std::int64_t batch = 0;
  std::int64_t chunk = 0;  // tokens of the chunked loss head; 0: whole logits
  int threads = 1;
  std::int64_t inside = 0;  // bytes that a matrix product takes meanwhile, for each of its result
  // The same whatever its result: by rows, depth and whether it is a weight's gradient.
  std::function<std::int64_t(std::int64_t, std::int64_t, bool)> panels;
  Place place = Place::cpu;

  // Of a product that sums over `depth`.
  std::int64_t panels_over(std::int64_t depth) const {
    return panels ? panels(tokens, depth, false) : 0;
  }
  // Of the gradient of a weight with so many rows, which sums over tokens.
  std::int64_t panels_of(std::int64_t rows) const {
    return panels ? panels(rows, tokens, true) : 0;
  }
  bool mixed() const { return residual_e != e; }
};

// x + attention(norm(x)), then x + mlp(norm(x)): layer norms, biases, GELU.
Pass gelu_block(const Sizes& sizes, Recompute mode);
// The same where what it saves leaves for the host or a file (poise/checkpointing.h).
Pass gelu_block_away(const Sizes& sizes, Recompute mode);
// The same with RMS norms, rotary positions and a gated MLP, as transformers writes them.
Pass gated_block(const Sizes& sizes, Recompute mode);
Pass gated_block_away(const Sizes& sizes, Recompute mode);
// Norm, projection to the vocabulary and cross-entropy. `fused_norm`: a layer norm.
Pass head(const Sizes& sizes, bool fused_norm);
Pass head_away(const Sizes& sizes, bool fused_norm);
// Token embedding, with learned positions or the angles of rotary ones.
Pass embedding(const Sizes& sizes, bool positions, bool tied);

}  // namespace poise::plan
