// A budget that really runs out, and a process that goes on.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

TEST(Budget, HoldsToTheByte) {
  Ledger ledger;
  ledger.set_budget(1000);
  AccountScope scope(ledger, Account::other);
  at::Tensor most = bytes(900), rest = bytes(100);
  EXPECT_THROW(bytes(1), c10::OutOfMemoryError);
  EXPECT_EQ(ledger.snapshot().current_bytes, 1000);
  EXPECT_EQ(ledger.snapshot().peak_bytes, 1000);
  rest.reset();
  EXPECT_NO_THROW(rest = bytes(100));
  ledger.set_budget(0);
  EXPECT_NO_THROW(bytes(5000));
}

TEST(Budget, BelowWhatIsHeldRefusesUntilItFitsAgain) {
  Ledger ledger;
  AccountScope scope(ledger, Account::other);
  at::Tensor held = bytes(1000);
  ledger.set_budget(500);
  EXPECT_THROW(bytes(1), c10::OutOfMemoryError);
  held.reset();
  EXPECT_NO_THROW(bytes(500));
}

TEST(Budget, IsTheLedgersOwn) {
  Ledger tight, wide;
  tight.set_budget(10);
  AccountScope scope(wide, Account::other);
  EXPECT_NO_THROW(bytes(1000));
}

TEST(Budget, RefusesANegativeOne) {
  Ledger ledger;
  EXPECT_THROW(ledger.set_budget(-1), Error);
}

TEST(Budget, MessageReadsLikeAGpus) {
  Ledger ledger;
  AccountScope scope(ledger, Account::parameters);
  const at::Tensor parameters = bytes(10 << 20);
  AccountScope inside(Account::activations);
  const at::Tensor activations = bytes(40 << 20);
  ledger.set_budget(64 << 20);
  try {
    bytes(20 << 20);
    FAIL() << "it fitted";
  } catch (const c10::OutOfMemoryError& error) {
    const std::string what = error.what_without_backtrace();
    EXPECT_EQ(
        what.find("[memory] CPU out of memory. Tried to allocate 20.00 MiB for activations. "
                  "The budget is 64.00 MiB, of which 50.00 MiB is held: activations 40.00 MiB, "
                  "parameters 10.00 MiB; "),
        0u)
        << what;
  }
}

TEST(Budget, RunsOutInsideBackwardAndTrainingGoesOn) {
  Ledger ledger;
  AccountScope scope(ledger, Account::activations);
  const at::Tensor x = at::ones({64, 64});  // 16384 bytes
  at::Tensor weight = at::ones({64, 64}).set_requires_grad(true);
  const auto loss = [&] { return at::matmul(at::matmul(x, weight), weight).sum(); };

  const at::Tensor first = loss();
  ledger.set_budget(ledger.snapshot().current_bytes + 16384);  // backward needs more than one
  EXPECT_THROW(first.backward(), c10::OutOfMemoryError);
  weight.mutable_grad().reset();

  ledger.set_budget(0);
  loss().backward();
  const at::Tensor got = weight.grad();
  // d/dW sum(X W W) with all ones: 64 rows x 64 from each of the two places.
  EXPECT_TRUE(got.equal(at::full({64, 64}, 2.0f * 64 * 64)));
  ledger.set_budget(ledger.snapshot().current_bytes);
  EXPECT_THROW(bytes(1), c10::OutOfMemoryError);
}

}  // namespace
}  // namespace poise::memory
