// A header before each block, torch's own allocation behind it, and the rules of coming and going.
#include "memory/counting_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>

#include "memory/account_scope.h"
#include "memory/ledger_state.h"
#include "poise/error.h"

namespace poise::memory {
namespace {

// Above torch's default (0). Whoever installs at 1 later sits on top of this one; see release.
constexpr std::uint8_t kPriority = 1;

// Process-wide because torch's allocator is. Never destroyed: blocks are freed while statics go
// down.
struct Shared {
  std::mutex mutex;
  int ledgers = 0;
  c10::Allocator* previous = nullptr;
  std::shared_ptr<LedgerState> fallback;
  std::atomic<bool> has_fallback{false};  // spares threads without a scope the lock
};
Shared& shared() {
  static Shared* one = new Shared;
  return *one;
}

struct Header {
  std::shared_ptr<LedgerState> ledger;  // null: counted nowhere
  std::int64_t bytes;
  Account account;
};
// Room for the header that keeps the data as aligned as torch promises it (64 bytes).
constexpr std::size_t kHeaderBytes = c10::gAlignment;
static_assert(sizeof(Header) <= kHeaderBytes);

std::shared_ptr<LedgerState> fallback_ledger() {
  if (!shared().has_fallback.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard guard(shared().mutex);
  return shared().fallback;
}

void free_block(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes);
  if (header->ledger) header->ledger->remove(header->bytes, header->account);
  header->~Header();
  c10::free_cpu(header);
}

// Passes over flats and large activations wait for page tables more than they need to: pages of
// 4 KiB miss the TLB, and fresh ones fault 512 times as often. Many systems give large pages to
// those who ask alone. Only whole pages inside the block are asked for; a system that has none
// refuses, which changes nothing.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
void prefer_huge_pages([[maybe_unused]] void* block, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < 2 * kHugePageBytes) return;
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(block);
  const auto begin = (address + page - 1) / page * page;
  const auto end = (address + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &free_block, cpu};
    const auto bytes = static_cast<std::int64_t>(size);
    const AccountScope::Position& position = current_position();
    auto ledger = position.ledger ? position.ledger : fallback_ledger();
    if (ledger && !ledger->device().is_cpu()) ledger = nullptr;  // the books of another memory
    if (ledger) ledger->add(bytes, position.account);
    void* data = allocate_block(size, std::move(ledger), position.account);
    c10::profiledCPUMemoryReporter().New(data, size);  // torch's profiler sees what it always saw
    return {data, data, &free_block, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static void* allocate_block(std::size_t size, std::shared_ptr<LedgerState> ledger,
                              Account account) {
    const auto bytes = static_cast<std::int64_t>(size);
    void* block = nullptr;
    try {
      block = c10::alloc_cpu(size + kHeaderBytes);
    } catch (...) {  // the machine itself has no more
      if (ledger) ledger->remove(bytes, account);
      throw;
    }
    prefer_huge_pages(block, size + kHeaderBytes);
    new (block) Header{std::move(ledger), bytes, account};
    return static_cast<char*>(block) + kHeaderBytes;
  }
};

// Never destroyed: storages keep a pointer to the allocator that made them, and resize through it.
CountingAllocator* allocator() {
  static auto* one = new CountingAllocator;
  return one;
}

// A fork in the middle of a change must not leave the child with a lock that nobody opens.
void watch_forks() {
  [[maybe_unused]] static const int once =
      pthread_atfork([] { shared().mutex.lock(); }, [] { shared().mutex.unlock(); },
                     [] { shared().mutex.unlock(); });
}

}  // namespace

void install_counting_allocator() {
  watch_forks();
  const std::lock_guard guard(shared().mutex);
  if (shared().ledgers == 0 && c10::GetCPUAllocator() != allocator()) {
    shared().previous = c10::GetCPUAllocator();
    c10::SetCPUAllocator(allocator(), kPriority);
    if (c10::GetCPUAllocator() != allocator()) {
      fail("memory", "another CPU allocator is installed with a priority above ",
           static_cast<int>(kPriority), "; install it with priority 0 or 1, or after the ledger");
    }
  }
  ++shared().ledgers;
}

void release_counting_allocator() {
  const std::lock_guard guard(shared().mutex);
  if (--shared().ledgers > 0) return;
  // Somebody installed on top of this allocator may pass on to it: then it stays below, uncounting.
  if (c10::GetCPUAllocator() == allocator()) c10::SetCPUAllocator(shared().previous, kPriority);
}

void set_default_ledger(std::shared_ptr<LedgerState> ledger) {
  const std::lock_guard guard(shared().mutex);
  shared().has_fallback.store(ledger != nullptr, std::memory_order_release);
  std::swap(shared().fallback, ledger);
}

void drop_default_ledger(const LedgerState* ledger) {
  std::shared_ptr<LedgerState> dropped;
  const std::lock_guard guard(shared().mutex);
  if (shared().fallback.get() != ledger) return;
  shared().has_fallback.store(false, std::memory_order_release);
  dropped = std::move(shared().fallback);
}

}  // namespace poise::memory
