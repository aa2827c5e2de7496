// torch::data loaders, vectors and own ranges grouped into windows that Engine::step takes. The
// only file that includes torch/data.
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/transforms/stack.h>

#include <list>

#include "poise/data.h"
#include "poise/engine.h"
#include "support/temp_folder.h"

namespace poise::data {
namespace {

using testing::message_of;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Counting : public torch::data::datasets::Dataset<Counting> {
 public:
  explicit Counting(std::size_t n) : n_(n) {}
  torch::data::Example<> get(std::size_t index) override {
    const auto value = static_cast<double>(index);
    return {at::full({2}, value), at::full({}, value)};
  }
  std::optional<std::size_t> size() const override { return n_; }

 private:
  std::size_t n_;
};

// Engine::step over a range of batches, as in engine.h: what a window has to offer to it.
template <class Window, class Fn>
std::vector<double> step_like_engine(Window&& window, Fn&& loss) {
  std::vector<double> losses;
  auto it = std::begin(window);
  const auto count = static_cast<std::size_t>(std::distance(it, std::end(window)));
  for (std::size_t i = 0; i < count; ++i)
    losses.push_back(Loss(loss(*it++)).value.template item<double>());
  return losses;
}

template <class Window, class Fn>
concept Steppable = requires(Engine engine, Window window, Fn loss) {
  { engine.step(window, loss) } -> std::same_as<StepResult>;
};
using LossOfExample = at::Tensor (*)(const torch::data::Example<>&);
using LossOfBatch = Loss (*)(const Batch&);
static_assert(Steppable<std::vector<torch::data::Example<>>&, LossOfExample>);
static_assert(Steppable<std::vector<Batch>&, LossOfBatch>);

TEST(Windows, GroupATorchLoaderAndTheLastOneIsShorter) {
  for (const std::size_t workers : {0, 2}) {
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        Counting(11).map(torch::data::transforms::Stack<>()),
        torch::data::DataLoaderOptions().batch_size(2).workers(workers));
    std::vector<std::vector<double>> losses;
    for (auto& window : windows(*loader, 4)) {
      losses.push_back(step_like_engine(
          window, [](const torch::data::Example<>& batch) { return batch.target.sum(); }));
    }
    EXPECT_THAT(losses, ElementsAre(ElementsAre(1, 5, 9, 13), ElementsAre(17, 10)));
  }
}

TEST(Windows, OfAnyRangeLeaveItsBatchesAlone) {
  std::vector<std::string> batches{"a", "b", "c"};
  std::vector<std::vector<std::string>> seen;
  for (auto& window : windows(batches, 2)) seen.push_back(std::move(window));
  EXPECT_THAT(seen, ElementsAre(ElementsAre("a", "b"), ElementsAre("c")));
  EXPECT_THAT(batches, ElementsAre("a", "b", "c"));

  std::size_t count = 0;
  for (auto& window : windows(std::list<int>{1, 2, 3, 4}, 2)) count += window.size();
  EXPECT_EQ(count, 4u) << "a temporary range lives as long as its windows";
  for (auto& window : windows(std::vector<int>{}, 2)) FAIL() << window.size();
  EXPECT_THAT(message_of([&] { windows(batches, 0); }), HasSubstr("windows of 0 batches"));
}

}  // namespace
}  // namespace poise::data
