// Host memory lies outside ledger and budget and is counted; spans in memory keep what was put.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "offload/settings.h"
#include "poise/memory.h"
#include "support/interrupts.h"
#include "support/slow_span.h"

namespace poise::offload {
namespace {

TEST(HostMemory, IsOutsideTheBudgetAndCounted) {
  memory::Ledger ledger;
  ledger.set_budget(1 << 20);
  const memory::AccountScope scope(ledger, memory::Account::optimizer);
  EXPECT_THROW(at::empty({1 << 20}, at::kFloat), c10::OutOfMemoryError) << "the budget is real";
  const auto memory = host_memory();
  {
    const auto large = memory->allocate(1 << 20, at::kFloat);
    const auto small = memory->allocate(3, at::kHalf);
    EXPECT_EQ(memory->bytes(), (4 << 20) + 4096) << "whole pages";
    EXPECT_EQ(memory->pinned_bytes(), 0);
    EXPECT_EQ(ledger.snapshot().current_bytes, 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.const_data_ptr()) % 4096, 0u);
    EXPECT_EQ(large.narrow(0, 1 << 19, 1000).abs().max().item<float>(), 0);
  }
  EXPECT_EQ(memory->bytes(), 0);
  EXPECT_EQ(memory->peak_bytes(), (4 << 20) + 4096);
}

TEST(HostMemory, TensorsMayOutliveIt) {
  at::Tensor kept;
  {
    const auto memory = host_memory();
    kept = memory->allocate(10, at::kFloat);
  }
  kept.fill_(3);
  EXPECT_EQ(kept.sum().item<float>(), 30);
}

TEST(HostMemory, RunningOutIsAnError) {
  const auto message =
      message_of([] { host_memory()->allocate(std::int64_t{1} << 55, at::kByte); });
  EXPECT_NE(message.find("[offload] the host has no"), std::string::npos) << message;
}

TEST(HostStore, GivesBackWhatWasPut) {
  const auto memory = host_memory();
  const auto store = host_store(memory, c10::Device(c10::kCPU));
  const auto span = store->reserve(1000, at::kFloat);
  EXPECT_EQ(memory->bytes(), 4096);
  const auto values = random_floats(300, 1);
  Stream::set_test_delay(3, 200);
  auto back = at::empty({302}, at::kFloat);
  span->put(700, values);
  span->fetch(698, back).wait();  // after the put, although on another stream
  Stream::set_test_delay(0, 0);
  EXPECT_TRUE(at::equal(back.narrow(0, 2, 300), values));
  EXPECT_EQ(back.narrow(0, 0, 2).abs().sum().item<float>(), 0) << "what was never put is zero";
  EXPECT_TRUE(at::equal(span->tensor().narrow(0, 700, 300), values));
}

TEST(Span, ReadsAndWritesOtherTypesAndShapes) {
  TempFolder folder;
  for (const auto& store : {host_store(host_memory(), c10::Device(c10::kCPU)),
                            file_store(policy_in(folder.path()), host_memory())}) {
    const auto span = store->reserve(64, at::kFloat);
    const auto matrix = random_floats(24, 2).view({4, 6}).t();
    span->write(5, matrix.to(at::kBFloat16));
    auto back = at::empty({6, 4}, at::kDouble);
    span->read(5, back);
    EXPECT_TRUE(at::equal(back, matrix.to(at::kBFloat16).to(at::kDouble)));
  }
}

// Ctrl-C ends the wait; the memory is the caller's again only when nothing comes into it any more.
TEST(Span, LeavesNoTransferBehindAnInterruptedRead) {
  constexpr std::int64_t kNumel = 1000;
  std::promise<void> go;
  Stream stream;
  testing::SlowSpan span(kNumel, stream, go.get_future().share());
  std::thread disk([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    go.set_value();
  });
  auto into = at::empty({kNumel}, at::kFloat);
  {
    const testing::Interrupts interrupts;
    EXPECT_THROW(span.read(0, into), Interrupted);
  }
  into.fill_(7);
  disk.join();
  stream.synchronize();
  EXPECT_TRUE(at::equal(into, at::full({kNumel}, 7.f)));
}

TEST(Resident, IsTheTensorItself) {
  const auto tensor = random_floats(20, 3);
  const auto span = resident(tensor);
  span->write(4, at::zeros({8}, at::kFloat));
  EXPECT_EQ(tensor.narrow(0, 4, 8).abs().sum().item<float>(), 0);
  EXPECT_TRUE(span->tensor().is_same(tensor));
  auto part = at::empty({3}, at::kFloat);
  span->fetch(17, part).wait();
  EXPECT_TRUE(at::equal(part, tensor.narrow(0, 17, 3)));
}

}  // namespace
}  // namespace poise::offload
