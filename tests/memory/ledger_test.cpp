// Books against cases counted by hand.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "memory/ledger_state.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

std::int64_t at(const std::array<std::int64_t, kAccounts>& accounts, Account account) {
  return accounts[static_cast<std::size_t>(account)];
}
std::int64_t sum(const std::array<std::int64_t, kAccounts>& accounts) {
  return std::accumulate(accounts.begin(), accounts.end(), std::int64_t{0});
}
at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

TEST(Ledger, CountsRequestedBytesUnderTheAccount) {
  Ledger ledger;
  AccountScope scope(ledger, Account::optimizer);
  at::Tensor odd = bytes(1001);
  at::Tensor floats = at::empty({10, 10});
  at::Tensor nothing = at::empty({0});
  const Snapshot now = ledger.snapshot();
  EXPECT_EQ(now.current_bytes, 1001 + 400);
  EXPECT_EQ(at(now.current, Account::optimizer), 1001 + 400);
  EXPECT_EQ(sum(now.current), now.current_bytes);
}

TEST(Ledger, ForwardAndBackwardToTheByte) {
  Ledger ledger;
  at::Tensor x, weight, loss;
  {
    AccountScope scope(ledger, Account::parameters);
    weight = at::ones({64, 64}).set_requires_grad(true);  // 16384
  }
  AccountScope scope(ledger, Account::activations);
  x = at::ones({32, 64});  // 8192
  {
    const at::Tensor y = at::matmul(x, weight);  // 8192, kept by mul for backward
    loss = y.mul(y).sum();                       // 8192 for the product, 4 for the sum
  }
  Snapshot now = ledger.snapshot();
  EXPECT_EQ(at(now.current, Account::parameters), 16384);
  EXPECT_EQ(at(now.current, Account::activations), 8192 + 8192 + 4);  // the product is gone
  EXPECT_EQ(now.peak_bytes, 16384 + 3 * 8192 + 4);
  EXPECT_EQ(sum(now.at_peak), now.peak_bytes);

  loss.backward();
  loss.reset();
  now = ledger.snapshot();
  EXPECT_EQ(at(now.current, Account::activations), 8192 + 16384);  // x and weight's gradient
  EXPECT_EQ(sum(now.at_peak), now.peak_bytes);
}

TEST(Ledger, EachAccountHasAPeakOfItsOwn) {
  Ledger ledger;
  {
    AccountScope scope(ledger, Account::staging);
    bytes(5000);
  }
  AccountScope scope(ledger, Account::gradients);
  at::Tensor kept = bytes(6000);
  const Snapshot now = ledger.snapshot();
  EXPECT_EQ(now.peak_bytes, 6000);
  EXPECT_EQ(at(now.at_peak, Account::staging), 0);
  EXPECT_EQ(at(now.at_peak, Account::gradients), 6000);
  EXPECT_EQ(at(now.own_peak, Account::staging), 5000);
}

TEST(Ledger, ResetPeakStartsFromWhatIsHeld) {
  Ledger ledger;
  AccountScope scope(ledger, Account::other);
  at::Tensor kept = bytes(100);
  bytes(900);
  EXPECT_EQ(ledger.snapshot().peak_bytes, 1000);
  ledger.reset_peak();
  const Snapshot now = ledger.snapshot();
  EXPECT_EQ(now.peak_bytes, 100);
  EXPECT_EQ(at(now.at_peak, Account::other), 100);
  EXPECT_EQ(at(now.own_peak, Account::other), 100);
}

TEST(AccountScope, NestsAndRestores) {
  Ledger outer, inner;
  at::Tensor a, b, c, d, e;
  {
    AccountScope first(outer, Account::parameters);
    a = bytes(1);
    {
      AccountScope second(Account::gradients);  // same ledger
      b = bytes(20);
      AccountScope third(inner, Account::staging);
      c = bytes(300);
    }
    d = bytes(4000);
  }
  e = bytes(50000);  // no scope: nobody's
  const Snapshot now = outer.snapshot();
  EXPECT_EQ(at(now.current, Account::parameters), 4001);
  EXPECT_EQ(at(now.current, Account::gradients), 20);
  EXPECT_EQ(now.current_bytes, 4021);
  EXPECT_EQ(inner.snapshot().current_bytes, 300);
  EXPECT_EQ(AccountScope::current().ledger, nullptr);
}

TEST(AccountScope, AnExceptionLeavesIt) {
  Ledger ledger;
  EXPECT_THROW(
      {
        AccountScope scope(ledger, Account::activations);
        throw std::runtime_error("out");
      },
      std::runtime_error);
  EXPECT_EQ(AccountScope::current().ledger, nullptr);
}

TEST(AccountScope, PositionReopensOnAnotherThread) {
  Ledger ledger;
  AccountScope scope(ledger, Account::communication);
  at::Tensor made;
  const AccountScope::Position position = AccountScope::current();
  std::thread([&] {
    AccountScope there(position);
    made = bytes(77);
  }).join();
  EXPECT_EQ(at(ledger.snapshot().current, Account::communication), 77);
}

TEST(Ledger, AFreeOnAnotherThreadComesOffTheRightBooks) {
  Ledger mine, theirs;
  at::Tensor made;
  {
    AccountScope scope(mine, Account::gradients);
    made = bytes(500);
  }
  std::thread([&] {
    AccountScope scope(theirs, Account::staging);
    at::Tensor own = bytes(9);
    made.reset();
    EXPECT_EQ(theirs.snapshot().current_bytes, 9);
  }).join();
  EXPECT_EQ(mine.snapshot().current_bytes, 0);
  EXPECT_EQ(theirs.snapshot().current_bytes, 0);
}

TEST(Ledger, GrowingAStorageHoldsBothForAMoment) {
  Ledger ledger;
  AccountScope scope(ledger, Account::other);
  at::Tensor t = at::empty({1000});  // 4000 bytes
  t.resize_({3000});                 // 12000 more, then 4000 less
  EXPECT_EQ(ledger.snapshot().current_bytes, 12000);
  EXPECT_EQ(ledger.snapshot().peak_bytes, 16000);
  t.resize_({10});  // torch keeps the storage
  EXPECT_EQ(ledger.snapshot().current_bytes, 12000);
  t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(t.storage().allocator()->allocate(0));
  EXPECT_EQ(ledger.snapshot().current_bytes, 0);
}

TEST(Ledger, DefaultTakesThreadsWithoutAScope) {
  auto first = std::make_unique<Ledger>();
  Ledger second;
  at::Tensor a, b, c;
  first->make_default();
  std::thread([&] { a = bytes(10); }).join();
  {
    AccountScope scope(second, Account::parameters);
    b = bytes(200);
  }
  EXPECT_EQ(at(first->snapshot().current, Account::other), 10);
  EXPECT_EQ(second.snapshot().current_bytes, 200);
  first.reset();
  c = bytes(3000);
  EXPECT_EQ(second.snapshot().current_bytes, 200);
}

TEST(Ledger, ASecondDefaultOutlivesTheFirst) {
  auto first = std::make_unique<Ledger>();
  Ledger second;
  first->make_default();
  second.make_default();
  first.reset();
  const at::Tensor a = bytes(10);
  EXPECT_EQ(second.snapshot().current_bytes, 10);
}

TEST(Ledger, PeakSplitsExactlyWithManyThreads) {
  Ledger ledger;
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&ledger, seed] {
      std::mt19937 random(seed);
      std::vector<at::Tensor> held(16);
      for (int i = 0; i < 4000; ++i) {
        AccountScope scope(ledger, static_cast<Account>(random() % kAccounts));
        held[random() % held.size()] = bytes(1 + random() % 4096);
      }
    });
  }
  std::thread watcher([&] {
    while (!done) {
      const Snapshot now = ledger.snapshot();
      ASSERT_EQ(sum(now.at_peak), now.peak_bytes);
      ASSERT_EQ(sum(now.current), now.current_bytes);
      ASSERT_LE(now.current_bytes, now.peak_bytes);
      std::this_thread::yield();
    }
  });
  for (auto& thread : threads) thread.join();
  done = true;
  watcher.join();
  const Snapshot end = ledger.snapshot();
  EXPECT_EQ(end.current_bytes, 0);
  EXPECT_EQ(sum(end.current), 0);
  EXPECT_GT(end.peak_bytes, 0);
}

TEST(CudaSnapshot, RefusesADeviceThatIsNotThere) {
  EXPECT_THROW(cuda_snapshot(-1), Error);
  EXPECT_THROW(cuda_snapshot(1000), Error);
  EXPECT_THROW(reset_cuda_peak(1000), Error);
}

}  // namespace
}  // namespace poise::memory
