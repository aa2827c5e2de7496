// Operation by operation: what is taken, what is kept for backward, what is given back. Gradients
// of weights live from the operation that makes them until the hook of their accumulator took them.
#include "plan/blocks.h"

#include <algorithm>

#include "plan/tape.h"

namespace poise::plan {
namespace {

// Scratch of torch's CPU flash attention, per thread: scores of a tile and its running rows.
std::int64_t attention_scratch(const Sizes& s, bool backward) {
  if (s.place == Place::gpu) return 0;
  const std::int64_t rows = s.sequence >= 768 ? 256 : s.sequence >= 192 ? 64 : 32;
  const auto query = std::min(s.sequence, rows), keys = std::min<std::int64_t>(s.sequence, 512);
  const auto head = s.query / s.heads;
  if (backward) return 4 * s.threads * 2 * query * keys;
  return 4 * s.threads * (query * keys + 2 * query + query * head);
}

// A weight's gradient as its parameter has it, where a product makes it (`bytes`) in another type.
std::int64_t recast(const Sizes& s, std::int64_t bytes) {
  return s.weight_e == s.e ? 0 : bytes / s.e * s.weight_e;
}

// What leaves is in memory until it is out: two tensors on their way (`leaving`); for backward
// others come before they are needed. `bare`: a forward that keeps nothing.
Pass away(const Pass& kept, std::int64_t bare, std::int64_t stays, std::int64_t largest) {
  Pass pass;
  pass.saved = stays;
  pass.forward_peak = std::min(kept.forward_peak, bare + stays + 2 * largest);
  pass.backward_peak =
      std::min(kept.backward_peak, kept.backward_peak - (kept.saved - stays) + 2 * largest);
  pass.leaving = 2 * largest;
  pass.again_flops = kept.again_flops;
  pass.sent = static_cast<double>(kept.saved - stays);
  return pass;
}

// The sizes of a GELU block's tensors. Under autocast the residual stream and what norms make stay
// in fp32 (`r`), and products take 16-bit copies of them; elsewhere the two are one.
struct Gelu {
  std::int64_t r, x, copy, qkv, ffn, stats, lse;
  std::int64_t w_qkv, w_proj, w_mlp, vector;  // gradients as products make them
  explicit Gelu(const Sizes& s)
      : r(s.tokens * s.width * s.residual_e),
        x(s.tokens * s.width * s.e),
        copy(s.mixed() ? x : 0),
        qkv(3 * x),
        ffn(s.tokens * s.ffn * s.e),
        stats(2 * s.tokens * 4),
        lse(s.tokens * s.heads * 4),
        w_qkv(3 * s.width * s.width * s.e),
        w_proj(s.width * s.width * s.e),
        w_mlp(s.width * s.ffn * s.e),
        vector(s.width * s.weight_e) {}
  // What a norm made, where its copy is what stays.
  std::int64_t made() const { return copy > 0 ? r : 0; }
  // Input, two norms' outputs and statistics, qkv, attention, the residual, both halves of the MLP.
  std::int64_t saved() const { return 2 * r + qkv + lse + 3 * x + 2 * stats + 2 * ffn; }
};

// Forward that keeps what backward needs. Ends with the input of the next link beside it.
void forward(Tape& t, const Gelu& g, const Sizes& s) {
  t.take(g.r + g.stats).take(g.copy).multiply(g.qkv);  // norm, qkv
  t.take(g.x + g.lse).pass(attention_scratch(s, false));
  t.multiply(g.x).give(g.made()).take(g.r).give(g.x);  // projection, residual
  t.take(g.r + g.stats).take(g.copy).multiply(g.ffn).give(g.made());
  t.take(g.ffn);  // norm, first half, GELU
}

// From everything saved and the gradient of the output to the gradient of the input. `copy`: the
// gradient as the product's result has it. An operation keeps what forward saved until the sum over
// its bias is made, and no longer than it reads it where that was made `again`.
void backward(Tape& t, const Gelu& g, const Sizes& s, bool again) {
  t.take(g.copy).multiply(g.ffn).multiply(g.w_mlp, s.panels_of(s.width));
  t.pass(again ? 0 : g.vector).give(g.ffn).pass(recast(s, g.w_mlp)).give(g.w_mlp).give(g.copy);
  t.take(g.ffn).give(2 * g.ffn);  // GELU: gradient in, what was saved and gradient
  t.multiply(g.x, s.panels_over(s.ffn)).multiply(g.w_mlp, s.panels_of(s.ffn));
  t.give(g.x).pass(recast(s, g.w_mlp)).pass(4 * g.vector).give(g.w_mlp).give(g.ffn);
  t.take(g.made()).give(g.copy);
  t.take(g.r + 2 * g.vector).give(g.r + g.stats).give(2 * g.vector).give(g.r).give(g.r);
  t.take(g.copy).multiply(g.x);  // projection
  t.multiply(g.w_proj, s.panels_of(s.width)).pass(recast(s, g.w_proj)).give(g.w_proj).give(g.copy);
  t.take(3 * g.x).pass(attention_scratch(s, true)).give(g.lse + g.qkv + g.x).give(g.x);
  t.take(g.qkv).give(g.x);  // each of q, k and v into a whole gradient
  t.take(g.qkv).give(g.qkv).give(g.x);
  t.take(g.qkv).give(g.qkv).give(g.x);
  t.take(g.qkv).give(g.qkv);  // laid out as qkv was
  t.multiply(g.x, s.panels_over(3 * s.width));
  t.multiply(g.w_qkv, s.panels_of(3 * s.width)).give(g.x);
  t.pass(recast(s, g.w_qkv)).take(3 * g.vector).give(g.w_qkv + 3 * g.vector).give(g.qkv);
  t.take(g.made()).give(g.copy);
  t.take(g.r + 2 * g.vector).give(2 * g.vector).give(g.r + g.stats);
}

// Nothing is kept: temporaries go when their caller does.
std::int64_t bare_forward_peak(const Gelu& g, const Sizes& s) {
  Tape t(g.r, s.inside, s.panels_over(s.width));
  t.take(g.r + g.stats).give(g.stats).take(g.copy).multiply(g.qkv).give(g.copy);
  t.take(g.x + g.lse).pass(attention_scratch(s, false)).give(g.lse);
  t.multiply(g.x).give(g.qkv + g.x + g.r);
  t.take(g.r).give(g.x);
  t.take(g.r).take(g.copy).multiply(g.ffn).give(g.copy).give(g.r);
  t.take(g.ffn).give(g.ffn);
  t.multiply(g.x, s.panels_over(s.ffn)).give(g.ffn);
  t.take(g.r);
  return t.peak();
}

// Selective: outputs of the linear layers and of attention stay, with the input.
std::int64_t marked(const Gelu& g) { return g.r + g.qkv + g.x + g.lse + 2 * g.x + g.ffn; }

}  // namespace

Pass gelu_block(const Sizes& s, Recompute mode) {
  const Gelu g(s);
  Pass pass;
  if (mode == Recompute::none) {
    Tape f(g.r, s.inside, s.panels_over(s.width));
    forward(f, g, s);
    f.multiply(g.x, s.panels_over(s.ffn)).take(g.r);  // second half, residual
    pass.saved = g.saved();
    pass.forward_peak = f.peak();
    Tape b(g.saved() + g.r, s.inside, s.panels_over(s.width));
    backward(b, g, s, false);
    pass.backward_peak = b.peak();
    return pass;
  }
  const auto kept = mode == Recompute::selective ? marked(g) : g.r;
  pass.saved = kept;
  pass.forward_peak = bare_forward_peak(g, s) + kept - g.r;
  // What is recomputed is not allocated twice where it stayed.
  Tape b(g.r + kept);
  Tape again(g.r + g.r, s.inside, s.panels_over(s.width));
  forward(again, g, s);
  backward(again, g, s, true);
  const auto twice = mode == Recompute::selective ? g.x : 0;  // outputs that no backward reads
  b.take(std::max<std::int64_t>(0, again.peak() - b.now()) + twice);
  pass.backward_peak = b.peak();
  return pass;
}

Pass gelu_block_away(const Sizes& s, Recompute mode) {
  const Gelu g(s);
  const auto kept = gelu_block(s, mode);
  const auto bare = bare_forward_peak(g, s);
  if (mode == Recompute::whole) return away(kept, bare, 0, g.r);
  // q, k and v are pieces of one tensor, which do not travel; rows' statistics are too small.
  return away(kept, bare, g.qkv + g.lse + 2 * g.stats, g.ffn);
}

namespace {

struct Gated {
  std::int64_t x, norm, norm_kept, q, kv, ffn, lse, w_qo, w_mlp;
  explicit Gated(const Sizes& s)
      : x(s.tokens * s.width * s.e),
        // In fp32 (x and x times the root), in the model's type (before the weight, after it).
        norm(s.tokens * s.width * (4 + 4 + 2 * s.e) + 4 * s.tokens),
        norm_kept(s.tokens * s.width * (4 + s.e) + 4 * s.tokens + x),
        q(s.tokens * s.query * s.e),
        kv(s.tokens * s.kv * s.e),
        ffn(s.tokens * s.ffn * s.e),
        lse(s.tokens * s.heads * 4),
        w_qo(s.width * s.query * s.e),
        w_mlp(s.width * s.ffn * s.e) {}
  // Two norms; rotated q, k and v; attention's output; gate, its SiLU, up and their product.
  std::int64_t saved() const { return x + 2 * norm_kept + q + 2 * kv + q + lse + 4 * ffn; }
};

void forward(Tape& t, const Gated& g) {
  t.take(g.norm).give(g.norm - g.norm_kept);
  t.multiply(g.q).take(g.kv).multiply(g.kv);              // projected
  t.take(g.q + g.kv).give(g.q + g.kv);                    // rotated
  t.take(g.q + g.lse).multiply(g.x).take(g.x).give(g.x);  // attention, residual
  t.take(g.norm).give(g.norm - g.norm_kept);
  t.multiply(g.ffn).take(g.ffn).multiply(g.ffn).take(g.ffn);
}

void backward(Tape& t, const Gated& g, const Sizes& s) {
  const auto weight = [&](std::int64_t bytes, std::int64_t rows) {
    t.multiply(bytes, s.panels_of(rows)).pass(recast(s, bytes)).give(bytes);
  };
  t.multiply(g.ffn);
  weight(g.w_mlp, s.width);
  t.give(g.ffn);                      // down: its input goes
  t.take(2 * g.ffn).give(3 * g.ffn);  // product
  t.multiply(g.x, s.panels_over(s.ffn));
  weight(g.w_mlp, s.ffn);
  t.give(g.ffn);                  // up
  t.take(g.ffn).give(2 * g.ffn);  // SiLU
  t.multiply(g.x, s.panels_over(s.ffn));
  weight(g.w_mlp, s.ffn);
  t.give(g.ffn).give(g.x);  // gate
  t.take(g.norm).give(g.norm).give(g.norm_kept);
  t.multiply(g.q);
  weight(g.w_qo, s.width);
  t.take(g.q + 2 * g.kv).give(2 * g.q + g.lse + g.q + 2 * g.kv - g.q);
  t.take(g.q + g.kv).give(g.q + g.kv);
  t.take(g.x).multiply(g.x);
  weight(g.w_qo, s.query);
  t.give(g.x).give(g.q + 2 * g.kv);
  t.take(g.norm).give(g.norm).give(g.norm_kept);
}

std::int64_t bare_forward_peak(const Gated& g, const Sizes& s) {
  Tape attention(g.x + g.x, s.inside, s.panels_over(s.width));
  attention.pass(g.norm).take(g.x).multiply(g.q).take(g.kv).multiply(g.kv);
  attention.take(g.q + g.kv).give(g.q + g.kv);
  attention.take(g.q + g.lse).multiply(g.x);
  Tape mlp(g.x + g.x, s.inside, s.panels_over(s.width));
  mlp.pass(g.norm).take(g.x).take(g.ffn).take(g.ffn).multiply(g.ffn);
  return std::max(attention.peak(), mlp.peak());
}

}  // namespace

Pass gated_block(const Sizes& s, Recompute mode) {
  const Gated g(s);
  Pass pass;
  if (mode == Recompute::none) {
    Tape f(g.x, s.inside, s.panels_over(s.width));
    forward(f, g);
    f.take(g.x).take(g.x);
    pass.saved = g.saved();
    pass.forward_peak = f.peak();
    Tape b(g.saved() + g.x, s.inside, s.panels_over(s.width));
    backward(b, g, s);
    pass.backward_peak = b.peak();
    return pass;
  }
  // Selective: q, k, v, both outputs of attention, gate and up, what they are projected to.
  const auto marked = g.x + g.q + 2 * g.kv + g.q + g.lse + 2 * g.x + 2 * g.ffn;
  const auto kept = mode == Recompute::selective ? marked : g.x;
  Tape again(g.x + g.x, s.inside, s.panels_over(s.width));
  forward(again, g);
  backward(again, g, s);
  pass.saved = kept;
  pass.forward_peak = bare_forward_peak(g, s) + kept - g.x;
  pass.backward_peak =
      std::max(again.peak(), kept + g.x) + (mode == Recompute::selective ? 2 * g.x : 0);
  return pass;
}

Pass gated_block_away(const Sizes& s, Recompute mode) {
  const Gated g(s);
  const auto kept = gated_block(s, mode);
  const auto bare = bare_forward_peak(g, s);
  if (mode == Recompute::whole) return away(kept, bare, 0, g.x);
  return away(kept, bare, 8 * s.tokens + g.lse, g.ffn);
}

Pass embedding(const Sizes& s, bool positions) {
  const auto x = s.tokens * s.width * s.residual_e;
  const auto row = positions ? s.sequence * s.width * s.residual_e : 0;
  const auto indices = positions ? s.sequence * 8 : 0;
  const auto table = s.vocabulary * s.width * s.weight_e;
  // As if they were there from the beginning: the loss, its weight, its gradient, and its count.
  constexpr std::int64_t kScalars = 20;
  Pass pass;
  pass.saved = indices + kScalars;
  pass.forward_peak = pass.saved + x + row + (positions ? x : 0);
  pass.backward_peak = pass.saved + x + std::max(2 * row, table);
  return pass;
}

Pass head(const Sizes& s, bool fused_norm) {
  const auto r = s.tokens * s.width * s.residual_e, x = s.tokens * s.width * s.e;
  const auto norm_kept =
      fused_norm ? x + 8 * s.tokens : s.tokens * s.width * (4 + s.e) + 4 * s.tokens + x;
  const auto norm_work = fused_norm ? x + 8 * s.tokens : s.tokens * s.width * (8 + 2 * s.e);
  const auto table = s.vocabulary * s.width * s.e;  // its gradient as the product makes it
  const auto copy = s.mixed() ? table : 0;          // of the weight, from forward to backward
  const auto logits = s.tokens * s.vocabulary;
  Pass pass;
  if (s.chunk > 0) {
    const auto rows = std::min(s.chunk, s.tokens);
    const auto part = rows * s.vocabulary * 4;
    const auto low = s.e == 4 ? 0 : rows * s.vocabulary * s.e;
    const auto sums = s.vocabulary * s.width * 4;
    pass.saved = r + norm_kept;
    pass.forward_peak = r + norm_work + copy + 2 * part + low;
    pass.backward_peak = pass.saved + x + sums + 2 * part + low + rows * s.width * s.e +
                         (s.weight_e == 4 ? copy : table) + s.inside * table +
                         s.panels_of(s.vocabulary);
    return pass;
  }
  const auto cast = s.e == 4 ? 0 : logits * s.e;  // of the logits to fp32
  const auto kept = r + norm_kept + copy;
  pass.saved = kept + 4 * logits;
  pass.forward_peak = kept + 8 * logits + cast;
  // The log-softmax and two gradients of it; then it is gone, and a cast gradient replaces them.
  const auto gradient = s.e == 4 ? 4 * logits : cast + 8;
  const auto product =
      std::max(s.inside * x + s.panels_over(s.vocabulary),
               table + std::max(s.inside * table + s.panels_of(s.vocabulary), recast(s, table)));
  pass.backward_peak = kept + std::max(12 * logits, gradient + x + product);
  return pass;
}

Pass head_away(const Sizes& s, bool fused_norm) {
  const auto kept = head(s, fused_norm);
  const auto x = s.tokens * s.width * s.e;
  // Of whole logits their log-softmax, which backward wants back at once.
  const auto largest = s.chunk > 0 ? x : std::max(x, 4 * s.tokens * s.vocabulary);
  auto pass = away(kept, kept.forward_peak, 0, largest);
  pass.leaving = largest + x;
  return pass;
}

}  // namespace poise::plan
