#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "poise/memory.h"
#include "poise/stream.h"

namespace poise::memory {
namespace {

TEST(ScopeCapture, AStreamsWorkCountsWhereItWasSubmitted) {
  Ledger ledger;
  Stream stream(c10::Device(c10::DeviceType::CPU), scope_capture());
  at::Tensor a, b, c;
  {
    AccountScope scope(ledger, Account::staging);
    stream.submit([&] { a = at::empty({10}, at::kByte); });
  }
  {
    AccountScope scope(ledger, Account::communication);
    stream.submit([&] { b = at::empty({200}, at::kByte); });
  }
  stream.submit([&] { c = at::empty({3000}, at::kByte); });  // no scope: nobody's
  stream.synchronize();
  const Snapshot now = ledger.snapshot();
  EXPECT_EQ(now.current[static_cast<std::size_t>(Account::staging)], 10);
  EXPECT_EQ(now.current[static_cast<std::size_t>(Account::communication)], 200);
  EXPECT_EQ(now.current_bytes, 210);
}

}  // namespace
}  // namespace poise::memory
