// A C++ training loop of one's own: a convolutional net with batch norm learns which way stripes
// run.
//
//   build/cpu/examples/example_convnet
//
// Expect the loss to fall from about 0.7 to below 0.1 in 30 updates, and an accuracy of 1.00 or
// close. Batch norm takes its statistics from each micro-batch, so accumulation is not the same
// training as a big batch here (docs/concepts.md); the micro-batch of 32 is part of the model.
#include <poise/poise.h>
#include <torch/torch.h>

#include <cstdio>

struct Batch {
  torch::Tensor image;  // [B, 1, 16, 16]
  torch::Tensor label;  // [B] 0: vertical stripes, 1: horizontal
};

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    layers = register_module(
        "layers",
        torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)),
                              torch::nn::BatchNorm2d(8), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).padding(1)),
                              torch::nn::BatchNorm2d(16), torch::nn::ReLU(),
                              torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten()));
    head = register_module("head", torch::nn::Linear(16, 2));
  }
  torch::Tensor forward(const torch::Tensor& image) { return head(layers->forward(image)); }

  torch::nn::Sequential layers{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ConvNet);

Batch striped_images(int64_t count) {
  Batch batch{torch::randn({count, 1, 16, 16}) * 0.5, torch::randint(0, 2, {count})};
  const auto wave = torch::sin(torch::arange(16) * 1.6 + torch::rand({count, 1}) * 6.28);
  const auto vertical = wave.view({count, 1, 1, 16}).expand({count, 1, 16, 16});
  const auto down = batch.label.view({count, 1, 1, 1}) == 1;
  batch.image += torch::where(down, vertical.transpose(2, 3), vertical);
  return batch;
}

int main() {
  torch::manual_seed(1);
  ConvNet model;

  poise::Config config;
  config.optimizer.lr = 1e-2;
  config.optimizer.weight_decay = 0.01;
  config.schedule.type = "cosine";
  config.schedule.warmup_updates = 3;
  config.schedule.total_updates = 30;
  poise::Engine engine(poise::view(*model), config);

  for (int update = 1; update <= 30; ++update) {
    std::vector<Batch> window;  // two micro-batches, one update
    for (int i = 0; i < 2; ++i) window.push_back(striped_images(32));
    const auto result = engine.step(window, [&](const Batch& batch) {
      return torch::nn::functional::cross_entropy(model(batch.image), batch.label);
    });
    if (update == 1 || update % 10 == 0) {
      std::printf("update %2d  loss %.4f  norm %.3f  lr %.4f  peak %s\n", update, result.loss,
                  result.grad_norm, result.lr,
                  poise::memory::format_bytes(result.peak_bytes).c_str());
    }
  }

  model->eval();
  torch::NoGradGuard no_grad;
  const auto test = striped_images(256);
  const double accuracy =
      (model(test.image).argmax(1) == test.label).to(torch::kDouble).mean().item<double>();
  std::printf("accuracy %.2f\n", accuracy);
  return accuracy > 0.9 ? 0 : 1;
}
