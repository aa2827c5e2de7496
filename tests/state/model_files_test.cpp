// Models that others saved, into one of ours.
#include "poise/model_files.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "poise/state.h"
#include "state/files.h"
#include "state/safetensors.h"
#include "state/training.h"

namespace poise::state {
namespace {

using testing::message_of;
using testing::TempFolder;

// A safetensors file of these tensors.
void write(const std::string& path, const std::vector<NamedTensor>& tensors) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  std::ofstream file(path, std::ios::binary);
  file << write_header(entries, {});
  for (const auto& [name, tensor] : tensors) {
    const auto flat = tensor.detach().contiguous();
    file.write(static_cast<const char*>(flat.const_data_ptr()),
               static_cast<std::streamsize>(flat.nbytes()));
  }
}

TEST(ModelFiles, FillAModelByNameAndCast) {
  const TempFolder folder;
  const auto w = test::normal({3, 2}, 1), b = test::normal({3}, 2).to(at::kBFloat16);
  write(folder / "model.safetensors", {{"model.w", w}, {"model.b", b}, {"rest", b}});
  // The weight lies the other way round in memory, the bias is fp32.
  const auto mine = at::empty({2, 3}, at::kFloat).t().zero_().requires_grad_();
  const auto bias = at::zeros({3}, at::kFloat);
  const ModelView view{{{"w", mine}, {"b", bias}}, {{"unsaved", at::zeros({1}, at::kFloat)}}, {}};
  const auto unused =
      load_model(view, folder.path(), [](const std::string& name) { return "model." + name; });
  EXPECT_TRUE(at::equal(mine, w));
  EXPECT_TRUE(at::equal(bias, b.to(at::kFloat)));
  EXPECT_EQ(unused, std::vector<std::string>{"rest"});
}

TEST(ModelFiles, ComeInParts) {
  const TempFolder folder;
  const auto w = test::normal({4}, 1), b = test::normal({2}, 2);
  write(folder / "model-00001-of-00002.safetensors", {{"w", w}});
  write(folder / "model-00002-of-00002.safetensors", {{"b", b}});
  folder.write("model.safetensors.index.json",
               "{\"metadata\":{},\"weight_map\":{\"w\":\"model-00001-of-00002.safetensors\","
               "\"b\":\"model-00002-of-00002.safetensors\"}}");
  const auto mine = at::zeros({4}, at::kFloat), bias = at::zeros({2}, at::kFloat);
  EXPECT_TRUE(load_model({{{"w", mine}, {"b", bias}}, {}, {}}, folder.path()).empty());
  EXPECT_TRUE(at::equal(mine, w));
  EXPECT_TRUE(at::equal(bias, b));
  folder.write("model.safetensors.index.json", "{\"weight_map\":{\"w\":\"../secret\"}}");
  EXPECT_NE(message_of([&] {
              load_model({{{"w", mine}}, {}, {}}, folder.path());
            }).find("no file beside it"),
            std::string::npos);
}

// What GPT-2's blocks are made of.
struct Projection : torch::nn::Module {
  Projection(std::int64_t in, std::int64_t out) {
    register_parameter("weight", at::zeros({in, out}, at::kFloat));
    register_parameter("bias", at::zeros({out}, at::kFloat));
  }
};

struct Norm : torch::nn::Module {
  explicit Norm(std::int64_t width) {
    register_parameter("weight", at::zeros({width}, at::kFloat));
    register_parameter("bias", at::zeros({width}, at::kFloat));
  }
};

struct Gpt2Block : torch::nn::Module {
  explicit Gpt2Block(std::int64_t width) {
    const auto part = [&](const char* name, const char* first, std::int64_t out, std::int64_t in) {
      auto made = register_module(name, std::make_shared<torch::nn::Module>());
      made->register_module(first, std::make_shared<Projection>(width, out));
      made->register_module("c_proj", std::make_shared<Projection>(in, width));
    };
    register_module("ln_1", std::make_shared<Norm>(width));
    part("attn", "c_attn", 3 * width, width);
    register_module("ln_2", std::make_shared<Norm>(width));
    part("mlp", "c_fc", 4 * width, 4 * width);
  }
};

// A folder that transformers wrote, by python/tests/test_state.py, which compares what is put
// there.
TEST(ModelFiles, MayBeATransformersFolder) {
  const char* folder = std::getenv("POISE_TRANSFORMERS_MODEL");
  if (folder == nullptr) GTEST_SKIP() << "run by python/tests/test_state.py";
  const Gpt2Block block(16);
  const auto unused = load_model(view(block), folder,
                                 [](const std::string& name) { return "transformer.h.1." + name; });
  EXPECT_EQ(std::count(unused.begin(), unused.end(), "transformer.wte.weight"), 1);
  std::ofstream out(in(folder, "loaded"), std::ios::binary);
  for (const auto& item : block.named_parameters()) {
    const auto& values = item.value();
    out << item.key() << ' ' << values.nbytes() << '\n';
    out.write(static_cast<const char*>(values.const_data_ptr()),
              static_cast<std::streamsize>(values.nbytes()));
  }
}

TEST(ModelFiles, AreTheExportOfASave) {
  const TempFolder folder;
  test::GridModel model, other;
  Engine engine(model.view(), test::adamw_config());
  export_model(engine.save(folder.path()), folder / "model.safetensors");
  {
    at::NoGradGuard no_grad;
    for (auto& [name, tensor] : other.slots()) tensor->zero_();
  }
  EXPECT_TRUE(load_model(other.view(), folder / "model.safetensors").empty());
  for (auto& [name, tensor] : other.slots()) {
    EXPECT_TRUE(at::equal(*tensor, engine.master(name).to(tensor->scalar_type()))) << name;
  }
}

TEST(ModelFiles, TouchNothingWhereSomethingIsWrong) {
  const TempFolder folder;
  write(folder / "x.safetensors", {{"w", test::normal({4}, 1)}, {"bias", test::normal({2}, 2)}});
  const auto mine = at::zeros({4}, at::kFloat);
  const auto refused = [&](const NamedTensor& second, const std::string& says) {
    const auto message = message_of([&] {
      load_model({{{"w", mine}, second}, {}, {}}, folder / "x.safetensors");
    });
    EXPECT_NE(message.find(says), std::string::npos) << message;
    EXPECT_TRUE(at::equal(mine, at::zeros({4}, at::kFloat)));
  };
  refused({"bais", at::zeros({2}, at::kFloat)}, "the nearest is 'bias'");
  refused({"bias", at::zeros({3}, at::kFloat)}, "'bias' has shape [3], and 'bias' in ");
  EXPECT_NE(message_of([&] {
              load_model({{{"w", mine}}, {}, {}}, folder / "no");
            }).find("no model in "),
            std::string::npos);
}

}  // namespace
}  // namespace poise::state
