// The books of one ledger. Shared by the Ledger, the scopes opened on it and every block counted in
// it, so that it outlives its Ledger for as long as one of its blocks does.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>

#include "core/fork.h"
#include "poise/memory.h"

namespace poise::memory {

class LedgerState {
 public:
  // Throws torch's OutOfMemoryError where the total would go over the budget.
  void add(std::int64_t bytes, Account account);
  // The same whatever the budget: the memory is given out already.
  void add_given(std::int64_t bytes, Account account) noexcept;
  void remove(std::int64_t bytes, Account account) noexcept;

  Snapshot snapshot() const;
  void reset_peak();
  void set_budget(std::int64_t bytes);
  std::int64_t budget() const;

  void set_device(c10::Device device) { device_ = device; }
  c10::Device device() const { return device_; }

 private:
  void count(std::int64_t bytes, Account account) noexcept;  // under the lock
  std::unique_lock<std::mutex> lock() const;
  // In a forked child: another thread of the parent may have held the lock.
  bool from_before_fork() const { return generation_ != fork_generation(); }

  // One short lock per allocation: the split at the peak must be of one moment, over all threads.
  mutable std::mutex mutex_;
  Snapshot books_;
  std::int64_t budget_ = 0;
  c10::Device device_{c10::DeviceType::CPU};  // set before anything is counted
  const int generation_ = fork_generation();
};

}  // namespace poise::memory
