// A byte-level GPT in C++ that trains on this very file, with accumulation, checkpointing of every
// block and 16-bit parameters chosen by one Config.
//
//   build/cpu/examples/example_gpt [path of a text file; default: examples/gpt.cpp]
//
// Expect the loss to fall from about 5.5 to below 3.5 in 30 updates.
#include <poise/checkpointing.h>
#include <poise/poise.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iterator>

constexpr int64_t kWidth = 64, kHeads = 4, kLayers = 2, kLength = 64;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    ln1 = register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    proj = register_module("proj", torch::nn::Linear(kWidth, kWidth));
    ln2 = register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    fc = register_module("fc", torch::nn::Linear(kWidth, 4 * kWidth));
    out = register_module("out", torch::nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto heads = qkv(ln1(x))
                           .view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads})
                           .permute({2, 0, 3, 1, 4});
    const auto mixed =
        at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    const auto y = x + proj(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + out(torch::gelu(fc(ln2(y))));
  }
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() {
    token = register_module("token", torch::nn::Embedding(256, kWidth));
    position = register_module("position", torch::nn::Embedding(kLength, kWidth));
    for (int i = 0; i < kLayers; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head",
                           torch::nn::Linear(torch::nn::LinearOptions(kWidth, 256).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& bytes) {
    auto x = token(bytes) + position->weight;
    for (const auto& module : *blocks) {
      const auto block = std::dynamic_pointer_cast<BlockImpl>(module);
      x = poise::checkpointing::recompute(
          [block](const at::Tensor& in) { return block->forward(in); }, x);
    }
    return head(norm(x));
  }
  torch::nn::Embedding token{nullptr}, position{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

torch::Tensor read_bytes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() <= kLength + 1)
    poise::fail("example", path, " holds ", text.size(), " bytes; a longer text is needed");
  return torch::tensor(
      std::vector<int64_t>(reinterpret_cast<const unsigned char*>(text.data()),
                           reinterpret_cast<const unsigned char*>(text.data()) + text.size()));
}

int main(int argc, char** argv) {
  torch::manual_seed(1);
  Gpt model;
  const auto text = read_bytes(argc > 1 ? argv[1] : "examples/gpt.cpp");

  poise::Config config;
  config.optimizer.lr = 3e-3;
  config.optimizer.weight_decay = 0.1;
  config.schedule.type = "cosine";
  config.schedule.warmup_updates = 3;
  config.schedule.total_updates = 30;
  poise::Engine engine(poise::view(*model), config);

  double loss = 0;
  for (int update = 1; update <= 30; ++update) {
    std::vector<torch::Tensor> window;  // four micro-batches of four sequences
    for (int i = 0; i < 4; ++i) {
      std::vector<torch::Tensor> rows;
      for (const auto start : torch::randint(text.size(0) - kLength - 1, {4}).unbind()) {
        rows.push_back(text.narrow(0, start.item<int64_t>(), kLength + 1));
      }
      window.push_back(torch::stack(rows));
    }
    const auto result = engine.step(window, [&](const torch::Tensor& rows) {
      const auto logits = model(rows.narrow(1, 0, kLength));
      const auto targets = rows.narrow(1, 1, kLength).reshape({-1});
      return poise::Loss::mean(torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets),
                               targets.numel());
    });
    loss = result.loss;
    if (update == 1 || update % 10 == 0) {
      std::printf("update %2d  loss %.4f  tokens %.0f  peak %s\n", update, result.loss,
                  result.tokens, poise::memory::format_bytes(result.peak_bytes).c_str());
    }
  }
  return loss < 3.5 ? 0 : 1;
}
