// Operation by operation: what is taken, what is kept for backward, what is given back. Gradients
// of weights live from the operation that makes them until the hook of their accumulator took them.
#include "plan/blocks.h"

#include <algorithm>
#include <utility>

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

// The sizes of a gated block's tensors, as transformers writes it. The residual stream is what it
// is for a GELU block; a 16-bit one (`narrow`) goes through an fp32 copy in each norm. Under
// autocast each projection takes a 16-bit copy of its own, and queries and keys are rotated in
// fp32.
struct Gated {
  bool narrow;
  std::int64_t r, x, copy, wide, rows, q, kv, rotated_q, rotated_kv, ffn, lse;
  std::int64_t w_qo, w_kv, w_mlp;  // gradients as products make them, 16-bit copies of weights
  explicit Gated(const Sizes& s)
      : narrow(s.residual_e < 4),
        r(s.tokens * s.width * s.residual_e),
        x(s.tokens * s.width * s.e),
        copy(s.mixed() ? x : 0),
        wide(s.tokens * s.width * 4),
        rows(s.tokens * 4),
        q(s.tokens * s.query * s.e),
        kv(s.tokens * s.kv * s.e),
        rotated_q(s.tokens * s.query * s.residual_e),
        rotated_kv(s.tokens * s.kv * s.residual_e),
        ffn(s.tokens * s.ffn * s.e),
        lse(s.tokens * s.heads * 4),
        w_qo(s.width * s.query * s.e),
        w_kv(s.width * s.kv * s.e),
        w_mlp(s.width * s.ffn * s.e) {}
  bool mixed() const { return copy > 0; }
};

// Its output stays, and what backward needs, if that is kept.
void norm(Tape& t, const Gated& g, bool keeps) {
  if (g.narrow) {
    t.take(g.wide).pass(g.wide).take(2 * g.rows).take(g.wide);  // copy, squares, over the root
    if (!keeps) t.give(g.wide);
    t.take(g.x).take(g.x).give(g.wide + g.rows);  // in 16 bits, times the weight
    if (!keeps) t.give(g.x + g.rows);
    return;
  }
  t.pass(g.r).take(2 * g.rows).take(g.r).take(g.r).give(g.rows);
  if (!keeps) t.give(g.r + g.rows);
}

// The copy of a weight that is kept is counted elsewhere (Link::casts).
void project(Tape& t, const Gated& g, std::int64_t result, std::int64_t weight, bool keeps) {
  const auto passing = g.mixed() && !keeps ? weight + g.copy : 0;
  t.take(keeps ? g.copy : passing).multiply(result).give(passing);
}

// x cos + (x turned by half) sin.
void rotate(Tape& t, std::int64_t bytes, std::int64_t rotated) {
  t.take(rotated).take(bytes).take(rotated).give(bytes).take(rotated).give(2 * rotated);
}

// Up to the product of both halves of the MLP.
void forward(Tape& t, const Gated& g, const Sizes& s, bool keeps) {
  norm(t, g, keeps);
  project(t, g, g.q, g.w_qo, keeps);
  project(t, g, g.kv, g.w_kv, keeps);
  project(t, g, g.kv, g.w_kv, keeps);
  rotate(t, g.q, g.rotated_q);
  rotate(t, g.kv, g.rotated_kv);
  t.give(g.q + g.kv);
  const auto casts = g.mixed() ? g.q + g.kv : 0;
  t.take(casts).take(g.q + g.lse).pass(attention_scratch(s, false));
  if (!keeps) t.give(casts + g.lse);
  const auto passing = g.mixed() && !keeps ? g.w_qo : 0;
  t.take(passing).multiply(g.x).give(passing);
  if (g.mixed() || !keeps) t.give(g.rotated_q + g.rotated_kv + g.r);  // rotated, the norm's output
  if (!keeps) t.give(g.kv + g.q);
  t.take(g.r).give(g.x);  // residual
  norm(t, g, keeps);
  project(t, g, g.ffn, g.w_mlp, keeps);
  t.take(g.ffn);  // SiLU
  if (!keeps) t.give(g.ffn);
  project(t, g, g.ffn, g.w_mlp, keeps);
  t.take(g.ffn);
  if (!keeps) t.give(2 * g.ffn);
}

// The rest. The output stays, beside the input.
void end_forward(Tape& t, const Gated& g, const Sizes& s, bool keeps) {
  const auto passing = g.mixed() && !keeps ? g.w_mlp : 0;
  t.take(passing).multiply(g.x, s.panels_over(s.ffn)).give(passing);
  if (!keeps) t.give(g.ffn);
  if (g.mixed() || !keeps) t.give(g.r);  // the norm's output
  t.take(g.r).give(g.x);
  if (g.narrow || !keeps) t.give(g.r);  // what the norm got
}

// From the gradient of a norm's output to that of its input, which joins the residual's.
void norm_backward(Tape& t, const Gated& g) {
  t.take(2 * g.r).give(3 * g.r);  // to the weight and to what was normalized, which goes
  if (g.narrow) t.take(g.wide).give(g.x);
  t.take(2 * g.wide).give(2 * g.wide);  // to the root and to what it divides
  t.take(4 * g.wide).give(4 * g.wide);  // through the mean and the squares
  t.give(g.rows + g.wide);
  if (g.narrow) t.pass(g.x).give(g.wide);
}

void backward(Tape& t, const Gated& g, const Sizes& s) {
  // `given`: the gradient of its result; `kept`: its input, where no other product reads it.
  const auto product = [&](std::int64_t input, std::int64_t weight, std::int64_t depth,
                           std::int64_t rows, std::int64_t given, std::int64_t kept) {
    t.multiply(weight, s.panels_of(rows)).multiply(input, s.panels_over(depth));
    if (g.mixed()) t.give(weight);  // the weight's copy
    t.give(given + kept).pass(recast(s, weight)).give(weight);
  };
  // Gradients of 16-bit copies, to what was copied.
  const auto widen = [&] {
    if (g.mixed()) t.take(g.r).give(g.x);
  };
  t.take(g.copy);
  product(g.ffn, g.w_mlp, s.width, s.width, g.copy, g.ffn);
  t.take(2 * g.ffn).give(3 * g.ffn);
  product(g.x, g.w_mlp, s.ffn, s.ffn, g.ffn, g.copy);
  widen();
  t.take(g.ffn).give(2 * g.ffn);  // SiLU
  product(g.x, g.w_mlp, s.ffn, s.ffn, g.ffn, g.mixed() ? g.copy : g.x);
  widen();
  t.give(g.r);  // one sum
  norm_backward(t, g);
  if (!g.narrow) t.give(g.r);  // what the norm got
  t.take(g.copy);
  product(g.q, g.w_qo, s.width, s.width, g.copy, 0);
  t.take(g.q + 2 * g.kv).pass(attention_scratch(s, true));
  t.give(2 * g.q + 2 * g.kv + g.lse).give(g.q);
  for (const auto& [bytes, rotated] : {std::pair{g.kv, g.rotated_kv}, {g.q, g.rotated_q}}) {
    if (g.mixed()) t.take(rotated).give(bytes);
    t.take(2 * rotated).take(bytes).give(3 * rotated);
  }
  product(g.x, g.w_kv, s.kv, s.kv, g.kv, g.copy);
  widen();
  product(g.x, g.w_kv, s.kv, s.kv, g.kv, g.copy);
  widen();
  t.give(g.r);
  product(g.x, g.w_qo, s.query, s.query, g.q, g.mixed() ? g.copy : g.x);
  widen();
  t.give(g.r);
  norm_backward(t, g);
}

std::int64_t bare_forward_peak(const Gated& g, const Sizes& s) {
  Tape t(g.r, s.inside, s.panels_over(s.width));
  forward(t, g, s, false);
  end_forward(t, g, s, false);
  return t.peak();
}

// Selective: q, k, v, both outputs of attention, gate and up, what they are projected to.
std::int64_t marked(const Gated& g) {
  return g.r + g.q + 2 * g.kv + g.q + g.lse + 2 * g.x + 2 * g.ffn;
}

}  // namespace

Pass gated_block(const Sizes& s, Recompute mode) {
  const Gated g(s);
  Pass pass;
  if (mode == Recompute::none) {
    Tape f(g.r, s.inside, s.panels_over(s.width));
    forward(f, g, s, true);
    end_forward(f, g, s, true);
    // Of the input and the output the former stays, where the norm reads it itself.
    pass.saved = f.now() - g.r - (g.narrow ? g.r : 0);
    pass.forward_peak = f.peak();
    Tape b(pass.saved + g.r, s.inside, s.panels_over(s.width));
    backward(b, g, s);
    pass.backward_peak = b.peak();
    return pass;
  }
  pass.saved = mode == Recompute::selective ? marked(g) : g.r;
  pass.forward_peak = bare_forward_peak(g, s) + pass.saved - g.r;
  Tape again(g.r + g.r, s.inside, s.panels_over(s.width));
  forward(again, g, s, true);
  if (g.mixed() || g.narrow) again.give(g.r);  // what the function held: it ends here
  backward(again, g, s);
  pass.backward_peak =
      std::max(again.peak(), pass.saved + g.r) + (mode == Recompute::selective ? 2 * g.x : 0);
  return pass;
}

Pass gated_block_away(const Sizes& s, Recompute mode) {
  const Gated g(s);
  const auto kept = gated_block(s, mode);
  const auto bare = bare_forward_peak(g, s);
  if (mode == Recompute::whole) return away(kept, bare, 0, g.r);
  return away(kept, bare, 8 * s.tokens + g.lse, g.ffn);
}

Pass embedding(const Sizes& s, bool positions, bool tied) {
  const auto x = s.tokens * s.width * s.residual_e;
  const auto row = positions ? s.sequence * s.width * s.residual_e : 0;
  const auto table = s.vocabulary * s.width * s.weight_e;
  // As if they were there from the beginning: the loss, its weight, its gradient, and its count.
  constexpr std::int64_t kScalars = 20;
  Pass pass;
  if (positions) {
    pass.saved = s.sequence * 8 + kScalars;
    pass.forward_peak = pass.saved + x + row + x;
  } else {  // cosines and sines of rotary positions, made in fp32
    const auto angles = s.sequence * (s.query / s.heads);
    pass.saved = 2 * angles * s.residual_e + kScalars;
    pass.forward_peak = kScalars + x + s.sequence * 8 + 18 * angles;
  }
  // Where the head reads the same matrix, both gradients of it become a third, their sum.
  const auto kept = positions ? pass.saved : kScalars;
  pass.backward_peak = kept + std::max(x + std::max(2 * row, table), tied ? 2 * table : 0);
  return pass;
}

Pass head(const Sizes& s, bool fused_norm) {
  const Gated g(s);
  const auto r = g.r, x = g.x;
  Tape rms;
  norm(rms, g, true);
  // What stays of the norm; of its output a 16-bit copy, where the product takes one.
  const auto normed = fused_norm ? 2 * g.rows + x : rms.now() - r + x;
  const auto work = fused_norm ? normed : rms.peak();
  // A 16-bit RMS norm has copied it.
  const auto input = fused_norm || !g.narrow ? r : 0;
  const auto table = s.vocabulary * s.width * s.e;  // its gradient as the product makes it
  const auto copy = s.mixed() ? table : 0;          // of the weight, from forward to backward
  const auto logits = s.tokens * s.vocabulary;
  Pass pass;
  if (s.chunk > 0) {
    const auto chunk = std::min(s.chunk, s.tokens);
    const auto part = chunk * s.vocabulary * 4;
    const auto low = s.e == 4 ? 0 : chunk * s.vocabulary * s.e;
    const auto sums = s.vocabulary * s.width * 4;
    pass.saved = input + normed;
    pass.forward_peak = r + work + copy + 2 * part + low;
    pass.backward_peak = pass.saved + x + sums + 2 * part + low + chunk * s.width * s.e +
                         (s.weight_e == 4 ? copy : table) + s.inside * table +
                         s.panels_of(s.vocabulary);
    return pass;
  }
  const auto cast = s.e == 4 ? 0 : logits * s.e;  // of the logits to fp32
  const auto kept = input + normed + copy;
  pass.saved = kept + 4 * logits;
  pass.forward_peak = kept + 8 * logits + cast;
  // What functions of transformers hold until they end: under autocast the norm's output, labels
  // shifted by one, positions, in 16 bits the embedding's output.
  if (!fused_norm) pass.forward_peak += (s.e == 4 ? 0 : r) + 16 * s.tokens + 8 * s.sequence;
  // The log-softmax and two gradients of it; then it is gone, and a cast gradient replaces them.
  const auto gradient = s.e == 4 ? 4 * logits : cast + 8;
  const auto product =
      std::max(s.inside * x + s.panels_over(s.vocabulary),
               table + std::max(s.inside * table + s.panels_of(s.vocabulary), recast(s, table)));
  pass.backward_peak = kept + std::max(12 * logits, gradient + x + product);
  if (!fused_norm) {
    Tape t(input + normed - x + r);  // what it made is gone, its gradient came
    norm_backward(t, g);
    pass.backward_peak = std::max(pass.backward_peak, t.peak());
  }
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
