// Counting a described transformer: parameters and FLOPs.
#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

std::int64_t kv_width(const Transformer& m) {
  return (m.kv_heads > 0 ? m.kv_heads : m.heads) *
         (m.head_width > 0 ? m.head_width : m.width / m.heads);
}

std::int64_t query_width(const Transformer& m) {
  return m.heads * (m.head_width > 0 ? m.head_width : m.width / m.heads);
}

std::int64_t block_matrices(const Transformer& m) {
  const std::int64_t mlp = m.mlp == Mlp::gated ? 3 : 2;
  return 2 * m.width * (query_width(m) + kv_width(m)) + mlp * m.width * m.ffn;
}

std::int64_t block_vectors(const Transformer& m) {
  if (!m.biases) return 2 * m.width;
  const std::int64_t norms = 4 * m.width, mlp = (m.mlp == Mlp::gated ? 2 : 1) * m.ffn + m.width;
  return norms + query_width(m) + 2 * kv_width(m) + m.width + mlp;
}

}  // namespace

void check(const Transformer& m) {
  const auto positive = [&](std::int64_t value, const char* what) {
    if (value < 1) fail("plan", "the model's ", what, " is ", value, "; give at least 1");
  };
  positive(m.layers, "number of layers");
  positive(m.width, "width");
  positive(m.heads, "number of heads");
  positive(m.ffn, "ffn width");
  positive(m.vocabulary, "vocabulary");
  if (m.head_width < 0 || m.kv_heads < 0 || m.positions < 0) {
    fail("plan", "the model's head_width, kv_heads or positions is below 0; give 0 or more");
  }
  if (m.head_width == 0 && m.width % m.heads != 0) {
    fail("plan", "the model's width ", m.width, " is no multiple of its ", m.heads,
         " heads; give head_width");
  }
  if (m.kv_heads > 0 && m.heads % m.kv_heads != 0) {
    fail("plan", "the model's ", m.heads, " heads are no multiple of its ", m.kv_heads,
         " kv_heads; change one of them");
  }
  // Products of these stay far below 2^63.
  for (const auto value :
       {m.layers, m.width, m.heads, m.ffn, m.vocabulary, m.positions, m.head_width}) {
    if (value > 10'000'000) fail("plan", "the model has a size of ", value, "; give at most 1e7");
  }
}

std::int64_t parameters(const Transformer& m) {
  check(m);
  const std::int64_t embeddings = (m.tied ? 1 : 2) * m.vocabulary * m.width + m.positions * m.width;
  const std::int64_t norm = m.head_norm ? (m.biases ? 2 : 1) * m.width : 0;
  return embeddings + norm + m.layers * (block_matrices(m) + block_vectors(m));
}

double forward_flops(const Transformer& m, std::int64_t sequence) {
  check(m);
  const auto s = static_cast<double>(sequence);
  const double scores = 4.0 * s * static_cast<double>(query_width(m));
  const double block = 2.0 * static_cast<double>(block_matrices(m)) + scores;
  const double head = 2.0 * static_cast<double>(m.width) * static_cast<double>(m.vocabulary);
  return s * (static_cast<double>(m.layers) * block + head);
}

Transformer byte_gpt(const config::ModelPolicy& policy) {
  return {.name = "byte_gpt",
          .layers = policy.layers,
          .width = policy.width,
          .heads = policy.heads,
          .ffn = 4 * policy.width,
          .vocabulary = 256,
          .mlp = Mlp::gelu,
          .biases = true,
          .positions = policy.sequence_length};
}

}  // namespace poise::plan
