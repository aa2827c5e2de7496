// What recomputing holds, by the ledger, against bytes counted by hand.
#include <gtest/gtest.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include "poise/checkpointing.h"
#include "poise/memory.h"

namespace poise::checkpointing {
namespace {

using memory::Account;
using memory::AccountScope;
using memory::Ledger;

constexpr std::int64_t kFloat = 4;
constexpr std::int64_t kRows = 512, kWidth = 8, kHidden = 4 * kWidth;
constexpr std::int64_t kInput = kRows * kWidth * kFloat;     // of a block, and its output
constexpr std::int64_t kInner = kRows * kHidden * kFloat;    // before and after gelu
constexpr std::int64_t kWeight = kWidth * kHidden * kFloat;  // each of a block's two

at::Tensor weight(at::IntArrayRef sizes) { return at::randn(sizes).mul_(0.1).requires_grad_(true); }

// down(gelu(up(x))). Autograd keeps x, what goes into gelu and what comes out of it.
struct Block {
  at::Tensor up = weight({kHidden, kWidth}), down = weight({kWidth, kHidden});
  at::Tensor operator()(const at::Tensor& x) const {
    return at::linear(at::gelu(at::linear(x, up)), down);
  }
};

struct Peaks {
  std::int64_t held;      // between forward and backward, without the output
  std::int64_t backward;  // the highest of it
  std::int64_t left;      // after it
};

// One pass of a chain of `count` blocks. Weights and the gradient of the output are nobody's; the
// input, everything saved and the weights' gradients are counted.
Peaks pass(std::int64_t count, bool recomputed) {
  at::manual_seed(3);
  const std::vector<Block> blocks(1);  // the same weights in each block: one gradient in all
  const auto gradient = at::randn({kRows, kWidth});
  Ledger ledger;
  AccountScope scope(ledger, Account::activations);
  Peaks peaks{};
  {
    auto x = at::randn({kRows, kWidth});
    for (std::int64_t i = 0; i < count; ++i) {
      const auto block = blocks[0];
      x = recomputed ? recompute([block](const at::Tensor& in) { return block(in); }, x) : block(x);
    }
    peaks.held = ledger.snapshot().current_bytes - kInput;
    ledger.reset_peak();
    x.backward(gradient);
    peaks.backward = ledger.snapshot().peak_bytes - kInput;
  }
  peaks.left = ledger.snapshot().current_bytes;
  return peaks;
}

TEST(Memory, RecomputedBlocksHoldTheirInputs) {
  for (const std::int64_t count : {1, 2, 7}) {
    EXPECT_EQ(pass(count, true).held, count * kInput) << count;
    EXPECT_EQ(pass(count, false).held, count * (kInput + 2 * kInner)) << count;
    EXPECT_EQ(pass(count, true).left, 2 * kWeight) << count << ": the gradients of the weights";
  }
}

// A block that is recomputed: what goes into gelu, what comes out, and the gradient of one of them
// at a time, beside one weight's gradient. In all but the last block, both weights have gradients
// already; that block's input has gone then, and the gradient of it has come.
TEST(Memory, BackwardHoldsInputsAndOneBlock) {
  constexpr std::int64_t kOneBlock = 3 * kInner + kWeight;
  for (const std::int64_t count : {1, 2, 7}) {
    const std::int64_t gradients = count > 1 ? 2 * kWeight : 0;
    EXPECT_EQ(pass(count, true).backward, count * kInput + kOneBlock + gradients) << count;
    EXPECT_EQ(pass(count, false).backward, count * (kInput + 2 * kInner) + kInner + kWeight)
        << count;
  }
}

struct Head {
  static constexpr std::int64_t kTokens = 512, kClasses = 1024, kChunk = 32;
  static constexpr std::int64_t kLogits = kTokens * kClasses * kFloat;
  static constexpr std::int64_t kChunkLogits = kChunk * kClasses * kFloat;
  static constexpr std::int64_t kGradients = (kTokens + kClasses) * kWidth * kFloat;

  at::Tensor hidden = weight({kTokens, kWidth}), projection = weight({kClasses, kWidth});
  at::Tensor targets = at::randint(kClasses, {kTokens}, at::kLong);

  // Highest number of bytes during forward and backward, inputs not counted.
  template <class Loss>
  std::int64_t peak(const Loss& loss) const {
    Ledger ledger;
    AccountScope scope(ledger, Account::activations);
    loss(*this).backward();
    return ledger.snapshot().peak_bytes;
  }
};

// Logits of a chunk, their softmax beside them, and vectors of the length of the targets: their
// mask and their sums, and as many bytes again for what the chunk's own rows need.
TEST(Memory, ChunkedLossNeverHoldsTheLogits) {
  const auto chunked = Head().peak([](const Head& head) {
    return chunked_cross_entropy(head.hidden, head.projection, {}, head.targets, Head::kChunk)
        .loss_sum;
  });
  const auto whole = Head().peak([](const Head& head) {
    const auto logits = at::linear(head.hidden, head.projection);
    return at::cross_entropy_loss(logits, head.targets, {}, at::Reduction::Sum);
  });
  constexpr std::int64_t kVectors = 2 * Head::kTokens * 8;
  EXPECT_LE(chunked, 2 * Head::kChunkLogits + Head::kGradients + kVectors);
  EXPECT_LT(chunked, Head::kLogits / 4);
  EXPECT_GE(whole, 2 * Head::kLogits);
}

// One row more in each chunk costs that row's logits twice, whatever the number of tokens.
TEST(Memory, ChunkedLossGrowsWithTheChunk) {
  const auto peak = [](std::int64_t chunk) {
    return Head().peak([chunk](const Head& head) {
      return chunked_cross_entropy(head.hidden, head.projection, {}, head.targets, chunk).loss_sum;
    });
  };
  const auto row = 2 * Head::kClasses * kFloat;
  EXPECT_NEAR(static_cast<double>(peak(64) - peak(32)), static_cast<double>(32 * row), 32 * 32);
}

}  // namespace
}  // namespace poise::checkpointing
