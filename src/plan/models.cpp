// Public shapes by name.
#include <algorithm>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

struct Row {
  const char* name;
  std::int64_t layers, width, heads, kv_heads, ffn, vocabulary;
  bool tied = false;
  std::int64_t head_width = 0;
};

Transformer gated(const Row& row) {
  return {.name = row.name,
          .layers = row.layers,
          .width = row.width,
          .heads = row.heads,
          .kv_heads = row.kv_heads,
          .head_width = row.head_width,
          .ffn = row.ffn,
          .vocabulary = row.vocabulary,
          .tied = row.tied};
}

Transformer gpt2(const char* name, std::int64_t layers, std::int64_t width, std::int64_t heads) {
  return {.name = name,
          .layers = layers,
          .width = width,
          .heads = heads,
          .kv_heads = heads,
          .ffn = 4 * width,
          .vocabulary = 50257,
          .mlp = Mlp::gelu,
          .tied = true,
          .biases = true,
          .positions = 1024};
}

std::vector<Transformer> make_all() {
  std::vector<Transformer> all{
      gpt2("gpt2", 12, 768, 12),
      gpt2("gpt2-medium", 24, 1024, 16),
      gpt2("gpt2-large", 36, 1280, 20),
      gpt2("gpt2-xl", 48, 1600, 25),
  };
  for (const Row& row : std::initializer_list<Row>{
           {"tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32000},
           {"llama-2-7b", 32, 4096, 32, 32, 11008, 32000},
           {"llama-2-13b", 40, 5120, 40, 40, 13824, 32000},
           {"llama-2-70b", 80, 8192, 64, 8, 28672, 32000},
           {"llama-3-8b", 32, 4096, 32, 8, 14336, 128256},
           {"llama-3-70b", 80, 8192, 64, 8, 28672, 128256},
           {"llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256},
           {"llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, true},
           {"llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, true},
           {"mistral-7b", 32, 4096, 32, 8, 14336, 32000},
           {"phi-3-mini", 32, 3072, 32, 32, 8192, 32064},
           {"gemma-2b", 18, 2048, 8, 1, 16384, 256000, true, 256},
           {"gemma-7b", 28, 3072, 16, 16, 24576, 256000, true, 256},
       }) {
    all.push_back(gated(row));
  }
  return all;
}

}  // namespace

const std::vector<Transformer>& known_transformers() {
  static const auto all = make_all();
  return all;
}

Transformer known_transformer(const std::string& name) {
  std::string names;
  for (const auto& model : known_transformers()) {
    if (model.name == name) return model;
    names += (names.empty() ? "" : ", ") + model.name;
  }
  fail("plan", "unknown model \"", name, "\"; known are ", names,
       "; or describe it in a file: {\"layers\": ..., \"width\": ..., \"heads\": ..., \"ffn\": "
       "..., \"vocabulary\": ...}");
}

}  // namespace poise::plan
