// The built-in model: names and numbers of its Python twin, causality, recomputation, the loss
// head.
#include "cli/byte_gpt.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "poise/error.h"

namespace poise::cli {
namespace {

config::ModelPolicy tiny() {
  config::ModelPolicy policy;
  policy.layers = 2;
  policy.width = 16;
  policy.heads = 4;
  policy.sequence_length = 12;
  return policy;
}

data::Batch batch_of(std::int64_t batch, std::int64_t time) {
  const auto bytes =
      (at::arange(batch * (time + 1)) * 37 + 11).remainder(256).view({batch, time + 1});
  return {bytes.narrow(1, 0, time), bytes.narrow(1, 1, time)};
}

double mean_loss(ByteGpt& model, const data::Batch& batch) {
  return model.loss(batch).value.item<double>();
}

std::vector<at::Tensor> gradients(ByteGpt& model, const data::Batch& batch) {
  model.zero_grad();
  model.loss(batch).value.backward();
  std::vector<at::Tensor> out;
  for (const auto& parameter : model.parameters()) out.push_back(parameter.grad().clone());
  return out;
}

// python/tests/test_byte_gpt.py has the same list.
TEST(ByteGpt, NamesInOrder) {
  auto policy = tiny();
  policy.layers = 1;
  std::vector<std::string> names;
  for (const auto& item : ByteGpt(policy, 1).named_parameters()) names.push_back(item.key());
  EXPECT_THAT(names, ::testing::ElementsAre(
                         "tok.weight", "pos.weight", "blocks.0.ln1.weight", "blocks.0.ln1.bias",
                         "blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.0.proj.weight",
                         "blocks.0.proj.bias", "blocks.0.ln2.weight", "blocks.0.ln2.bias",
                         "blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.0.out.weight",
                         "blocks.0.out.bias", "ln.weight", "ln.bias", "head.weight"));
}

TEST(ByteGpt, StartsAsGpt2Does) {
  config::ModelPolicy policy;  // the default size: enough numbers for a deviation
  ByteGpt model(policy, 7);
  for (const auto& item : model.named_parameters()) {
    const auto& name = item.key();
    const auto& value = item.value();
    const bool residual = name.find("proj.weight") != std::string::npos ||
                          name.find("out.weight") != std::string::npos;
    if (value.dim() == 1) {
      EXPECT_TRUE((value == (name.find("bias") != std::string::npos ? 0 : 1)).all().item<bool>())
          << name;
    } else {
      const double expected = residual ? 0.02 / std::sqrt(8.0) : 0.02;
      EXPECT_NEAR(value.std().item<double>(), expected, 0.05 * expected) << name;
    }
  }
  ByteGpt same(policy, 7), other(policy, 8);
  EXPECT_TRUE(at::equal(model.parameters()[0], same.parameters()[0]));
  EXPECT_FALSE(at::equal(model.parameters()[0], other.parameters()[0]));
  // Untrained it knows nothing: about log 256 per byte.
  EXPECT_NEAR(mean_loss(model, batch_of(2, 64)), std::log(256.0), 0.3);
}

TEST(ByteGpt, SeesOnlyThePast) {
  ByteGpt model(tiny(), 3);
  const auto bytes = batch_of(1, 12).inputs;
  auto changed = bytes.clone();
  changed[0][8] = 200;
  const auto before = model.forward(bytes), after = model.forward(changed);
  EXPECT_TRUE(at::equal(before.narrow(1, 0, 8), after.narrow(1, 0, 8)));
  EXPECT_FALSE(at::equal(before.select(1, 8), after.select(1, 8)));
}

TEST(ByteGpt, RecomputingChangesNoBit) {
  auto policy = tiny();
  policy.dropout = 0.2;
  ByteGpt model(policy, 3);
  const auto batch = batch_of(3, 12);
  torch::manual_seed(5);
  const auto kept = gradients(model, batch);
  model.recompute({true, true});
  torch::manual_seed(5);
  const auto recomputed = gradients(model, batch);
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], recomputed[i])) << i;
}

TEST(ByteGpt, SelectiveRecomputingChangesNoBit) {
  ByteGpt model(tiny(), 3);
  const auto batch = batch_of(3, 12);
  const auto kept = gradients(model, batch);
  model.recompute({true, true}, checkpointing::Options::Keep::marked);
  const auto recomputed = gradients(model, batch);
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], recomputed[i])) << i;
}

TEST(ByteGpt, ChunkedHeadGivesTheSameLoss) {
  auto policy = tiny();
  ByteGpt whole(policy, 3);
  policy.loss_chunk_tokens = 5;  // 36 tokens: the last chunk is short
  ByteGpt chunked(policy, 3);
  const auto batch = batch_of(3, 12);
  EXPECT_NEAR(mean_loss(chunked, batch), mean_loss(whole, batch), 1e-6);
  const auto expected = gradients(whole, batch), sums = gradients(chunked, batch);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT((sums[i] - expected[i]).abs().max().item<double>(), 1e-6) << i;
  }
}

TEST(ByteGpt, WritesText) {
  ByteGpt model(tiny(), 3);
  const auto greedy = model.generate("abc", 20, 0, 1);  // longer than what it sees at once
  EXPECT_EQ(greedy.size(), 20u);
  EXPECT_EQ(greedy, model.generate("abc", 20, 0, 2));
  EXPECT_EQ(model.generate("abc", 20, 1, 1), model.generate("abc", 20, 1, 1));
  EXPECT_NE(model.generate("abc", 20, 1, 1), model.generate("abc", 20, 1, 2));
  EXPECT_EQ(model.generate("", 1, 0, 1).size(), 1u);
  EXPECT_TRUE(model.is_training());
}

TEST(ByteGpt, LongInputIsAnError) {
  ByteGpt model(tiny(), 3);
  EXPECT_THROW(model.forward(batch_of(1, 13).inputs), Error);
}

}  // namespace
}  // namespace poise::cli
