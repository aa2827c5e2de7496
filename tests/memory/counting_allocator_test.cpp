// How the allocator comes, goes, and what it leaves behind.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "memory/ledger_state.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

TEST(CountingAllocator, ComesWithTheFirstLedgerAndGoesWithTheLast) {
  c10::Allocator* before = c10::GetCPUAllocator();
  std::optional<Ledger> first(std::in_place), second(std::in_place);
  c10::Allocator* counting = c10::GetCPUAllocator();
  EXPECT_NE(counting, before);
  first.reset();
  EXPECT_EQ(c10::GetCPUAllocator(), counting);
  second.reset();
  EXPECT_EQ(c10::GetCPUAllocator(), before);
}

// The kernel's flags of the mapping that holds an address: " rd wr ... hg" where large pages are
// asked for.
std::string mapping_flags(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (range >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= address && address < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line.substr(8) + " ";
    }
  }
  return "";
}

TEST(CountingAllocator, LargeBlocksAskForLargePages) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  Ledger ledger;
  AccountScope scope(ledger, Account::other);
  const auto large = bytes(64 << 20);
  const auto* middle = large.data_ptr<std::uint8_t>() + large.numel() / 2;
  EXPECT_NE(mapping_flags(middle).find(" hg "), std::string::npos);
}

TEST(CountingAllocator, BlocksAreFreedByTheirOwnDeleters) {
  at::Tensor before = bytes(1000), inside;
  std::weak_ptr<LedgerState> state;
  {
    Ledger ledger;
    AccountScope scope(ledger, Account::other);
    state = ledger.state();
    inside = bytes(2000);
    before.reset();  // never counted, so nothing comes off
    EXPECT_EQ(ledger.snapshot().current_bytes, 2000);
  }
  at::Tensor after = bytes(3000);
  // The block keeps its books alive, and they are still right.
  ASSERT_FALSE(state.expired());
  EXPECT_EQ(state.lock()->snapshot().current_bytes, 2000);
  inside.fill_(1);
  inside.reset();
  EXPECT_TRUE(state.expired());
}

TEST(CountingAllocator, AStorageGrownAfterRemovalIsUncounted) {
  at::Tensor t;
  {
    Ledger ledger;
    AccountScope scope(ledger, Account::other);
    t = bytes(10);
  }
  t.resize_({5000});
  t.fill_(7);
  EXPECT_EQ(t[4999].item<int>(), 7);
}

TEST(CountingAllocator, FiftyLedgersLeaveNothing) {
  c10::Allocator* before = c10::GetCPUAllocator();
  std::vector<std::weak_ptr<LedgerState>> states;
  for (int i = 0; i < 50; ++i) {
    Ledger ledger;
    ledger.make_default();
    AccountScope scope(ledger, Account::parameters);
    const at::Tensor t = bytes(1 + i);
    states.push_back(ledger.state());
  }
  for (const auto& state : states) EXPECT_TRUE(state.expired());
  EXPECT_EQ(c10::GetCPUAllocator(), before);
}

TEST(CountingAllocator, KeepsTorchsAlignment) {
  Ledger ledger;
  for (std::int64_t count : {1, 7, 63, 64, 65, 4096, 100000, 3 << 20}) {
    const at::Tensor t = bytes(count);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data_ptr()) % 64, 0u) << count;
  }
}

TEST(CountingAllocator, RawPairWorks) {
  Ledger ledger;
  AccountScope scope(ledger, Account::staging);
  c10::Allocator* allocator = c10::GetCPUAllocator();
  void* raw = allocator->raw_allocate(123);
  EXPECT_EQ(ledger.snapshot().current_bytes, 123);
  allocator->raw_deallocate(raw);
  EXPECT_EQ(ledger.snapshot().current_bytes, 0);
  allocator->raw_deallocate(allocator->raw_allocate(0));
}

// An allocator of the user's that came later and passes on to the one below.
class OnTop final : public c10::Allocator {
 public:
  explicit OnTop(c10::Allocator* below) : below_(below) {}
  c10::DataPtr allocate(std::size_t size) override { return below_->allocate(size); }
  c10::DeleterFnPtr raw_deleter() const override { return below_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  c10::Allocator* below_;
};

TEST(CountingAllocator, StaysBelowOneThatWasPutOnTop) {
  c10::Allocator* before = c10::GetCPUAllocator();
  std::optional<Ledger> ledger(std::in_place);
  c10::Allocator* counting = c10::GetCPUAllocator();
  OnTop on_top(counting);
  c10::SetCPUAllocator(&on_top, 1);
  ledger.reset();
  EXPECT_EQ(c10::GetCPUAllocator(), &on_top);
  bytes(100).fill_(1);

  c10::SetCPUAllocator(before, 1);
  ledger.emplace();
  EXPECT_EQ(c10::GetCPUAllocator(), counting);
  ledger.reset();
  EXPECT_EQ(c10::GetCPUAllocator(), before);
}

// Data loaders fork while other threads allocate: the child must neither hang nor disturb the
// books.
TEST(CountingAllocator, AForkedChildIsFree) {
  Ledger ledger;
  std::atomic<bool> done = false;
  std::thread busy([&] {
    AccountScope scope(ledger, Account::activations);
    while (!done) bytes(100);
  });
  AccountScope scope(ledger, Account::other);
  const at::Tensor held = bytes(50);
  for (int i = 0; i < 5; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // a hang ends in a signal
      at::Tensor inherited = held;
      for (int k = 0; k < 100; ++k) bytes(1000);
      bool right = ledger.snapshot().current_bytes >= 0;
      Ledger own;
      AccountScope inside(own, Account::parameters);
      const at::Tensor t = bytes(60);
      right = right && own.snapshot().current_bytes == 60;
      _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  done = true;
  busy.join();
  EXPECT_EQ(ledger.snapshot().current_bytes, 50);
}

}  // namespace
}  // namespace poise::memory
