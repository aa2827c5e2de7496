// From a described transformer to its flats and links.
#include "plan/blocks.h"
#include "plan/states.h"

#include "poise/error.h"

namespace poise::plan {
namespace {

std::int64_t padded(std::int64_t elements) {
  return (elements + kAlignment - 1) / kAlignment * kAlignment;
}

// Whether autocast makes 16-bit copies of fp32 parameters.
bool casts(const config::PrecisionPolicy& precision) {
  return precision.dtype != config::DType::fp32 && precision.autocast &&
         precision.parameters == config::DType::fp32;
}

Sizes sizes_of(const Transformer& m, const Shape& shape, const config::PrecisionPolicy& precision,
               Place place, const CpuOperators& cpu) {
  const auto head = m.head_width > 0 ? m.head_width : m.width / m.heads;
  Sizes s;
  s.batch = shape.micro_batch;
  s.sequence = shape.sequence;
  s.tokens = shape.micro_batch * shape.sequence;
  s.e = precision.dtype == config::DType::fp32 ? 4 : 2;
  s.residual_e = casts(precision) ? 4 : s.e;
  s.weight_e = precision.parameters == config::DType::fp32 ? 4 : 2;
  s.width = m.width;
  s.query = m.heads * head;
  s.kv = (m.kv_heads > 0 ? m.kv_heads : m.heads) * head;
  s.ffn = m.ffn;
  s.heads = m.heads;
  s.vocabulary = m.vocabulary;
  s.chunk = shape.loss_chunk_tokens;
  s.threads = cpu.threads;
  const bool in_bf16 = place == Place::cpu && precision.dtype == config::DType::bf16;
  s.inside = in_bf16 ? cpu.bf16_product / s.e : 0;
  if (in_bf16) s.panels = cpu.bf16_panels;
  s.place = place;
  return s;
}

struct Matrix {
  std::int64_t rows, columns;
};

// Elements of tensors that lie together.
struct Count {
  std::int64_t padded = 0;
  std::int64_t matrices = 0;
  std::int64_t factored = 0;
};

Count count(const std::vector<Matrix>& matrices, const std::vector<std::int64_t>& vectors) {
  Count count;
  for (const auto& m : matrices) {
    count.matrices += m.rows * m.columns;
    count.padded += padded(m.rows * m.columns);
    count.factored += m.rows + m.columns;
  }
  for (const auto n : vectors) count.padded += padded(n);
  for (const auto n : vectors) count.factored += n;
  return count;
}

Count count_block(const Transformer& m, const Sizes& s) {
  std::vector<Matrix> matrices;
  std::vector<std::int64_t> vectors;
  if (m.biases && s.query == m.width && s.kv == m.width && m.mlp == Mlp::gelu) {
    matrices = {{3 * m.width, m.width}, {m.width, m.width}, {m.ffn, m.width}, {m.width, m.ffn}};
    vectors = {m.width, m.width, 3 * m.width, m.width, m.width, m.width, m.ffn, m.width};
  } else {
    matrices = {{s.query, m.width}, {s.kv, m.width}, {s.kv, m.width}, {m.width, s.query}};
    for (int i = 0; i < (m.mlp == Mlp::gated ? 3 : 2); ++i) matrices.push_back({m.ffn, m.width});
    vectors = {m.width, m.width};
    if (m.biases) {
      for (const auto v : {m.width, m.width, s.query, s.kv, s.kv, m.width, m.ffn, m.width}) {
        vectors.push_back(v);
      }
      if (m.mlp == Mlp::gated) vectors.push_back(m.ffn);
    }
  }
  return count(matrices, vectors);
}

Count count_rest(const Transformer& m) {
  std::vector<Matrix> matrices{{m.vocabulary, m.width}};
  if (!m.tied) matrices.push_back(matrices.front());
  if (m.positions > 0) matrices.push_back({m.positions, m.width});
  const auto norms = static_cast<std::size_t>(m.head_norm ? (m.biases ? 2 : 1) : 0);
  return count(matrices, std::vector<std::int64_t>(norms, m.width));
}

Link block_link(const Transformer& m, const Sizes& s) {
  Link link;
  link.block = true;
  for (const auto mode : {Recompute::none, Recompute::whole, Recompute::selective}) {
    auto& pass = link.passes[static_cast<std::size_t>(mode)];
    pass = m.mlp == Mlp::gelu ? gelu_block(s, mode) : gated_block(s, mode);
    link.away[static_cast<std::size_t>(mode)] =
        m.mlp == Mlp::gelu ? gelu_block_away(s, mode) : gated_block_away(s, mode);
  }
  auto one = m;
  one.layers = 1;
  auto none = one;
  none.vocabulary = 1;
  link.flops = static_cast<double>(s.batch) *
               (forward_flops(none, s.sequence) -
                2.0 * static_cast<double>(m.width) * static_cast<double>(s.sequence));
  constexpr auto whole = static_cast<std::size_t>(Recompute::whole);
  link.passes[whole].again_flops = link.away[whole].again_flops = link.flops;
  return link;
}

}  // namespace

Chain chain(const Transformer& m, const Shape& shape, const config::PrecisionPolicy& precision,
            Place place, const CpuOperators& cpu) {
  check(m);
  if (shape.micro_batch < 1 || shape.sequence < 1) {
    fail("plan", "a micro-batch of ", shape.micro_batch, " sequences of ", shape.sequence,
         " tokens; give at least 1 of each");
  }
  const auto s = sizes_of(m, shape, precision, place, cpu);
  const auto block = count_block(m, s);
  Chain chain;
  Link in;
  in.name = "the embedding";
  in.passes.fill(embedding(s, m.positions > 0, m.tied));
  in.away = in.passes;
  chain.links.push_back(in);
  auto link = block_link(m, s);
  link.casts = casts(precision) ? 2 * block.matrices : 0;
  for (std::int64_t i = 0; i < m.layers; ++i) {
    link.name = join("block ", i);
    link.flat = static_cast<int>(i);
    chain.flats.push_back(
        {.name = link.name, .elements = block.padded, .factored = block.factored});
    chain.links.push_back(link);
  }
  chain.rest = static_cast<int>(m.layers);
  const auto rest = count_rest(m);
  chain.flats.push_back({.name = "rest", .elements = rest.padded, .factored = rest.factored});
  Link out;
  out.name = "the head";
  out.passes.fill(head(s, m.biases));
  out.away.fill(head_away(s, m.biases));
  out.flops = 2.0 * static_cast<double>(s.tokens) * static_cast<double>(m.width) *
              static_cast<double>(m.vocabulary);
  if (shape.loss_chunk_tokens > 0) {
    for (auto& pass : out.passes) pass.again_flops = out.flops;
    for (auto& pass : out.away) pass.again_flops = out.flops;
  }
  // The gradient of a tied matrix waits for the embedding's share of it.
  out.held_gradient = m.tied ? m.vocabulary * m.width * s.weight_e : 0;
  chain.links.push_back(out);
  return chain;
}

}  // namespace poise::plan
