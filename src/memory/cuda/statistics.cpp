// Figures of one GPU from torch's caching allocator.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

c10::DeviceIndex checked(int device) {
  const int count = c10::cuda::device_count();  // 0 without a driver, never throws
  if (device < 0 || device >= count) {
    fail("memory", "no such CUDA device: ", device, "; this machine has ", count);
  }
  return static_cast<c10::DeviceIndex>(device);
}

}  // namespace

Snapshot cuda_snapshot(int device) {
  const auto index = checked(device);
  Snapshot snapshot;
  if (!caching::get()->initialized()) return snapshot;  // nothing was ever allocated
  // Requested bytes, like on the CPU: what the allocator rounds up is not in the plan either.
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const c10::CachingAllocator::Stat bytes = caching::getDeviceStats(index).requested_bytes[kAll];
  constexpr auto kOther = static_cast<std::size_t>(Account::other);
  snapshot.current_bytes = snapshot.current[kOther] = bytes.current;
  snapshot.peak_bytes = snapshot.at_peak[kOther] = snapshot.own_peak[kOther] = bytes.peak;
  return snapshot;
}

void reset_cuda_peak(int device) {
  const auto index = checked(device);
  if (caching::get()->initialized()) caching::resetPeakStats(index);
}

}  // namespace poise::memory
