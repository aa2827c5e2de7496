// The allocator tells of each block after it has given it out and before it gives it to another.
//
// [Note: under the allocator's lock] It tells while it holds its own lock, so that what is called
// here may neither throw nor allocate on a GPU nor wait for Python.
#include "memory/gpu_allocations.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "memory/account_scope.h"
#include "poise/error.h"
#include "poise/log.h"

namespace poise::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Entry = caching::TraceEntry;

struct Stamp {
  std::shared_ptr<LedgerState> ledger;
  std::int64_t bytes;
  Account account;
};

// Process-wide because the allocator is; never destroyed, for the same reason.
struct Shared {
  std::mutex mutex;
  std::unordered_map<std::size_t, Stamp> stamps;  // by address; no two GPUs share one
  std::unordered_map<c10::DeviceIndex, const void*> limited_by;
  bool attached = false;
};
Shared& shared() {
  static Shared* one = new Shared;
  return *one;
}

void given(const Entry& entry) {
  auto position = current_position();
  if (!position.ledger) position = autograd_position(entry.device_);
  const auto& ledger = position.ledger;
  if (!ledger || ledger->device().is_cpu() || ledger->device().index() != entry.device_) return;
  const auto bytes = static_cast<std::int64_t>(entry.size_);
  ledger->add_given(bytes, position.account);
  const std::lock_guard guard(shared().mutex);
  shared().stamps.insert_or_assign(entry.addr_, Stamp{ledger, bytes, position.account});
}

void taken_back(const Entry& entry) {
  std::unique_lock guard(shared().mutex);
  const auto found = shared().stamps.find(entry.addr_);
  if (found == shared().stamps.end()) return;
  const Stamp stamp = std::move(found->second);
  shared().stamps.erase(found);
  guard.unlock();
  stamp.ledger->remove(stamp.bytes, stamp.account);
}

// FREE_COMPLETED: memory that another stream still uses is not free yet.
void told(const Entry& entry) {
  if (entry.action_ == Entry::ALLOC) given(entry);
  if (entry.action_ == Entry::FREE_COMPLETED) taken_back(entry);
}

void check_device(c10::Device device) {
  const int count = c10::cuda::device_count();  // 0 without a driver, never throws
  if (device.index() < 0 || device.index() >= count) {
    fail("memory", "no such CUDA device: ", device.str(), "; this machine has ", count);
  }
}

}  // namespace

void watch_gpu_allocations(c10::Device device) {
  check_device(device);
  at::globalContext().lazyInitDevice(c10::kCUDA);  // the allocator knows its devices after that
  {
    const std::lock_guard guard(shared().mutex);
    if (std::exchange(shared().attached, true)) return;
  }
  try {
    caching::attachAllocatorTraceTracker(told);
  } catch (const c10::Error& error) {  // training goes on without the figures
    log::warning(
        "[memory] the GPU's allocator ", caching::get()->name(),
        " does not tell what it gives out, so that peaks and accounts are 0; torch's own does "
        "(PYTORCH_CUDA_ALLOC_CONF without backend)");
  }
}

void limit_gpu_memory(c10::Device device, std::int64_t bytes, const void* owner) {
  check_device(device);
  const auto whole = caching::get()->getMemoryInfo(device.index()).second;
  const double share = bytes > 0 ? static_cast<double>(bytes) / static_cast<double>(whole) : 1.0;
  caching::get()->setMemoryFraction(std::min(1.0, share), device.index());
  // What the allocator keeps of earlier tensors it gives out without a look at the limit.
  if (bytes > 0) caching::get()->emptyCache();
  const std::lock_guard guard(shared().mutex);
  shared().limited_by[device.index()] = owner;
}

void lift_gpu_limit(c10::Device device, const void* owner) {
  {
    const std::lock_guard guard(shared().mutex);
    const auto found = shared().limited_by.find(device.index());
    if (found == shared().limited_by.end() || found->second != owner) return;
    shared().limited_by.erase(found);
  }
  caching::get()->setMemoryFraction(1.0, device.index());
}

}  // namespace poise::memory
