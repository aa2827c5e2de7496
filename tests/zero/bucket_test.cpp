// Many small units: they travel in few collectives, with the bits they have when each travels by
// itself, as they do at stage 3.
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>

#include "zero/bucket.h"
#include "zero/training.h"

namespace poise {
namespace {

// A chain of small units with a large one in its middle.
struct Chain {
  static constexpr std::int64_t kWidth = 300, kLarge = 100'000;
  static constexpr int kUnits = 41;
  std::vector<at::Tensor> weights;
  std::vector<zero::Unit> units = std::vector<zero::Unit>(kUnits);

  Chain() {
    for (int i = 0; i < kUnits; ++i) {
      const auto numel = i == kUnits / 2 ? kLarge : kWidth;
      weights.push_back(test::normal({numel}, static_cast<std::uint64_t>(i), 0.3).requires_grad_());
    }
  }
  static std::string name_of(std::size_t unit) { return join("unit", unit); }
  ModelView view() const {
    ModelView made;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto name = join(name_of(i), ".weight");
      made.parameters.push_back({name, weights[i]});
      made.units.push_back({name_of(i), {name}});
    }
    return made;
  }
  void bind(const Engine& engine) {
    for (std::size_t i = 0; i < units.size(); ++i) units[i] = engine.unit(name_of(i));
  }
  at::Tensor loss(at::Tensor x) const {
    for (std::size_t i = 0; i < units.size(); ++i) {
      const auto& weight = weights[i];
      x = units[i](
          [&](const at::Tensor& y) { return y * 0.9 + at::tanh(weight.narrow(0, 0, kWidth) * y); },
          x);
    }
    return x.pow(2).mean();
  }
};

struct Trained {
  std::vector<at::Tensor> weights;
  std::vector<double> norms;
  comm::Traffic traffic;  // of the last update
};

// Rank r has `counts[r]` micro-batches. What all ranks ended with.
Trained train(const Config& config, const std::vector<int>& counts) {
  Trained trained;
  const auto body = [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    Chain model;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const int rank = group->rank();
    std::vector<double> norms;
    for (std::uint64_t update = 0; update < 3; ++update) {
      std::vector<at::Tensor> window;
      for (int i = 0; i < counts[static_cast<std::size_t>(rank)]; ++i) {
        const auto seed = 100 * update + static_cast<std::uint64_t>(10 * rank + i);
        window.push_back(test::normal({Chain::kWidth}, seed).requires_grad_());
      }
      group->reset_traffic();
      const auto loss = [&](const at::Tensor& x) { return Loss::mean(model.loss(x), 300); };
      norms.push_back(engine.step(window, loss).grad_norm);
    }
    const auto traffic = group->traffic();
    const auto whole = engine.gathered();
    if (rank != static_cast<int>(counts.size()) - 1) return;
    for (const auto& weight : model.weights) trained.weights.push_back(weight.detach().clone());
    trained.norms = norms;
    trained.traffic = traffic;
  };
  testing::on_ranks(static_cast<int>(counts.size()), body, {.timeout = std::chrono::seconds(60)});
  return trained;
}

Config config_of(int stage, config::Reduce reduce, config::DType wire) {
  Config config;
  config.optimizer = test::adamw();
  config.zero.stage = stage;
  config.zero.reduce = reduce;
  config.zero.gradient_dtype = wire;
  return config;
}

std::int64_t calls_of(const Trained& trained, comm::Kind kind) {
  return trained.traffic.calls[static_cast<std::size_t>(kind)];
}

void expect_same(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.norms, b.norms);
  ASSERT_EQ(a.weights.size(), static_cast<std::size_t>(Chain::kUnits));
  ASSERT_EQ(b.weights.size(), a.weights.size());
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(a.weights[i], b.weights[i])) << i;
  }
}

class Buckets : public ::testing::TestWithParam<std::tuple<std::vector<int>, config::DType>> {};

TEST_P(Buckets, ChangeNoBit) {
  const auto [counts, wire] = GetParam();
  using config::Reduce;
  const auto alone_last = train(config_of(3, Reduce::last, wire), counts);
  const auto alone_every = train(config_of(3, Reduce::every, wire), counts);
  for (const int stage : {0, 1, 2}) {
    SCOPED_TRACE(join("stage ", stage));
    for (const bool overlap : {true, false}) {
      auto config = config_of(stage, Reduce::automatic, wire);
      config.zero.overlap = overlap;
      expect_same(train(config, counts), stage == 2 ? alone_every : alone_last);
    }
    Stream::set_test_delay(7, 200);
    const auto delayed = train(config_of(stage, Reduce::automatic, wire), counts);
    Stream::set_test_delay(0, 0);
    expect_same(delayed, stage == 2 ? alone_every : alone_last);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Buckets,
    ::testing::Combine(::testing::Values(std::vector<int>{2, 2}, std::vector<int>{2, 1, 0}),
                       ::testing::Values(config::DType::fp32, config::DType::bf16)));

// Twenty small ones, the large one, twenty small ones.
TEST(Bucket, FewCollectivesCarryManyUnits) {
  constexpr int kMicroBatches = 2;
  const auto alone = train(config_of(3, config::Reduce::every, config::DType::fp32), {2, 2, 2});
  EXPECT_EQ(calls_of(alone, comm::Kind::reduce_scatter), Chain::kUnits * kMicroBatches);
  for (const int stage : {0, 1, 2}) {
    const auto trained =
        train(config_of(stage, config::Reduce::automatic, config::DType::fp32), {2, 2, 2});
    EXPECT_EQ(calls_of(trained, comm::Kind::reduce_scatter), stage == 2 ? 3 * kMicroBatches : 3);
    EXPECT_LT(calls_of(trained, comm::Kind::all_gather), 10);
  }
}

TEST(Bucket, HoldsNeighboursUpToItsSize) {
  std::vector<at::Tensor> tensors;
  ModelView view;
  const auto half = zero::kBucketBytes / 8;  // elements that fill a half of it
  for (const std::int64_t numel : {half, half, half, std::int64_t{0}, half, 3 * half, half}) {
    const auto name = join("w", view.units.size());
    view.parameters.push_back({name, at::zeros({numel}).requires_grad_()});
    view.units.push_back({name, {name}});
  }
  const ParamTable table(view, 0);
  const zero::Shards shards(table, config::ZeroPolicy{.stage = 2}, 1, 2);
  const std::vector<int> order{0, 1, 2, 3, 4, 5, 6};
  const zero::Buckets buckets(order, shards, [](int) { return at::kFloat; });
  ASSERT_NE(buckets.of(0), nullptr);
  EXPECT_EQ(buckets.of(0)->flats(), (std::vector<int>{0, 1}));
  EXPECT_EQ(buckets.of(2)->flats(), (std::vector<int>{2, 4})) << "an empty flat travels nowhere";
  for (const int alone : {3, 5, 6}) EXPECT_EQ(buckets.of(alone), nullptr) << alone;
  EXPECT_EQ(buckets.largest() * 4, zero::kBucketBytes);

  const zero::Buckets of_types(order, shards,
                               [](int flat) { return flat == 1 ? at::kHalf : at::kFloat; });
  EXPECT_EQ(of_types.of(0), nullptr);
  const auto& bucket = *buckets.of(2);
  const auto tensor = at::zeros({bucket.numel()});
  const auto flat = test::normal({shards.whole(4)}, 3);
  bucket.shards_of(4, tensor).copy_(zero::by_ranks(flat, shards));
  const auto mine = shards.mine(4);
  EXPECT_TRUE(at::equal(bucket.mine(tensor).narrow(0, shards.shard(2), shards.shard(4)),
                        flat.narrow(0, mine.begin, mine.size())));
}

}  // namespace
}  // namespace poise
