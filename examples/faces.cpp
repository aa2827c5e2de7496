// The engine by other names: windows of micro-batches in one call, blocks recomputed by number.
//
//   build/cpu/examples/example_faces
//
// Expect the loss to fall from about 1.1 to about 0.2 in 160 updates.
#include <poise/faces.h>
#include <torch/torch.h>

#include <cstdio>
#include <vector>

struct Batch {
  torch::Tensor x;      // [B, 8]
  torch::Tensor label;  // [B], 0 to 2
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const poise::ActivationCheckpoint& checkpoint) : checkpoint(checkpoint) {
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::GELU()));
    }
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(8, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < 4; ++i) {
      auto* block = blocks[static_cast<std::size_t>(i)]->as<torch::nn::Sequential>();
      x = checkpoint.block(
          i, [block](const torch::Tensor& input) { return block->forward(input); }, x);
    }
    return head(x);
  }

  const poise::ActivationCheckpoint& checkpoint;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

int main() {
  torch::manual_seed(1);
  std::vector<Batch> data;
  for (int i = 0; i < 160; ++i) {
    Batch batch{torch::randn({8, 8}), torch::empty({8}, torch::kLong)};
    batch.label = batch.x.slice(1, 0, 3).argmax(1);
    data.push_back(batch);
  }

  poise::AccumulationConfig config;
  config.micro_batch_size = 8;
  config.accumulation_steps = 4;
  config.gradient_checkpointing = true;
  config.checkpoint_interval = 2;  // every second block
  poise::GradientAccumulationSystem system(config);
  Net model(system.checkpoint());
  poise::Config settings;
  settings.optimizer.lr = 1e-2;
  system.over(poise::view(*model), settings);

  double last = 0;
  for (int epoch = 0; epoch < 4; ++epoch) {
    auto place = data.begin();
    while (auto loss = system.core_operation(place, data.end(), [&](const Batch& batch) {
      return poise::Loss::mean(torch::nn::functional::cross_entropy(model(batch.x), batch.label),
                               batch.x.size(0));
    })) {
      last = *loss;
    }
    std::printf("after %lld updates: loss %.4f, peak %s\n",
                static_cast<long long>(system.engine().updates()), last,
                poise::memory::format_bytes(system.last_result().peak_bytes).c_str());
  }
  return last < 0.5 ? 0 : 1;
}
