// Accumulators that come and go, over a store whose transfers take as long as a test wants.
#include "zero/accumulators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "poise/interrupt.h"
#include "support/slow_span.h"

namespace poise::zero {
namespace {

using Use = Accumulators::Use;

// Ctrl-C ends the wait and not the transfer, which would come into the sums of the next window.
TEST(Accumulators, AreNotWrittenToAfterAnInterruptedWindow) {
  constexpr std::int64_t kNumel = 1000;
  constexpr int kFlats = 4;  // one more than there are rooms for
  std::promise<void> go;
  Stream stream;
  const auto may_go = go.get_future().share();
  std::vector<offload::SpanPtr> spans;
  for (int i = 0; i < kFlats; ++i) {
    spans.push_back(std::make_shared<testing::SlowSpan>(kNumel, stream, may_go));
  }
  offload::HostMemory memory(c10::kCPU, 0);
  Accumulators accumulators(spans, &memory);
  for (int flat = 0; flat < kFlats; ++flat) accumulators.get(flat, Use::write).fill_(1);

  auto* before = set_interrupt_check([] { throw std::runtime_error("KeyboardInterrupt"); });
  EXPECT_THROW(accumulators.get(0, Use::read), std::runtime_error);
  std::thread disk([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    go.set_value();
  });
  accumulators.forget();
  set_interrupt_check(before);
  std::vector<at::Tensor> sums;
  for (int flat = 1; flat < kFlats; ++flat) {
    sums.push_back(accumulators.get(flat, Use::write).fill_(7));
  }
  disk.join();
  stream.synchronize();
  for (const auto& sum : sums) EXPECT_TRUE(sum.equal(at::full({kNumel}, 7.f)));
}

}  // namespace
}  // namespace poise::zero
