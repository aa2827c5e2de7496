// A staged store on a GPU: spans hold what plain memory would hold, by way of pinned memory, as
// much at once as is in flight. Uses libpoise's public symbols alone: tests/pretend_gpu runs it,
// too.
#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <random>

#include "poise/offload.h"
#include "support/temp_folder.h"

namespace poise::offload {
namespace {

using testing::TempFolder;

constexpr std::int64_t kNumel = 5000;
constexpr std::int64_t kPage = 4096;

at::Tensor random_floats(std::int64_t numel, std::uint64_t seed) {
  return at::empty({numel}, at::kFloat)
      .normal_(0, 1, at::make_generator<at::CPUGeneratorImpl>(seed));
}

class StagedOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "no GPU";
  }
  std::shared_ptr<Store> store_in(const TempFolder& folder) {
    config::OffloadPolicy policy;
    policy.directory = folder.path();
    policy.queue_depth = 3;
    policy.block_bytes = 2 * kPage;
    const auto buffers = std::make_shared<HostMemory>(c10::Device(c10::kCPU), 0);
    return staged_store(file_store(policy, buffers), memory, gpu);
  }
  const c10::Device gpu{c10::kCUDA, 0};
  const std::shared_ptr<HostMemory> memory =
      std::make_shared<HostMemory>(gpu, std::int64_t{1} << 30);
};

TEST_F(StagedOnGpu, SpansHoldWhatPlainMemoryWouldHold) {
  TempFolder folder;
  const auto store = store_in(folder);
  std::mt19937 random(7);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
  const auto span = store->reserve(kNumel, at::kFloat);
  auto plain = at::zeros({kNumel}, at::kFloat);
  struct Expected {
    Event event;
    at::Tensor got, wanted;
  };
  std::vector<Expected> fetched;
  for (int i = 0; i < 200; ++i) {
    const auto begin = below(kNumel), count = 1 + below(kNumel - begin);
    const auto device = below(3) == 0 ? c10::Device(c10::kCPU) : gpu;
    if (below(2) == 0) {
      const auto values = random_floats(count, static_cast<std::uint64_t>(i));
      plain.narrow(0, begin, count).copy_(values);
      span->put(begin, values.to(device));
    } else {
      const auto to = at::zeros({count}, at::TensorOptions(at::kFloat).device(device));
      fetched.push_back({span->fetch(begin, to), to, plain.narrow(0, begin, count).clone()});
    }
  }
  for (std::size_t i = 0; i < fetched.size(); ++i) {
    fetched[i].event.synchronize();
    ASSERT_TRUE(at::equal(fetched[i].got.cpu(), fetched[i].wanted)) << "fetch " << i;
  }
}

// Buffers are as many as were in flight, and used again.
TEST_F(StagedOnGpu, StagingIsWhatIsInFlight) {
  TempFolder folder;
  const auto store = store_in(folder);
  const auto span = store->reserve(kNumel, at::kFloat);
  const auto values = random_floats(kNumel, 5).to(gpu);
  constexpr std::int64_t kBuffer = 5 * kPage;
  for (int i = 0; i < 50; ++i) span->put(0, values).synchronize();
  EXPECT_EQ(memory->peak_bytes(), kBuffer);
  EXPECT_EQ(memory->pinned_bytes(), kBuffer);
  for (int i = 0; i < 20; ++i) {
    span->put(0, values);
    span->put(10, values.narrow(0, 0, 100));
    span->fetch(0, at::zeros({kNumel}, values.options())).synchronize();
  }
  EXPECT_LE(memory->peak_bytes(), 3 * kBuffer) << "no more than three were in flight";
}

}  // namespace
}  // namespace poise::offload
