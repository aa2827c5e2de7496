// The ledger: how many bytes each account of a run holds, and a budget that really runs out.
// An allocation belongs to the ledger and account of the innermost AccountScope of its thread and
// carries that stamp until it is freed, by whichever thread. Requested bytes are counted, not the
// allocator's rounding. CPU tensors go through a counting allocator that is installed by the first
// Ledger and taken out when the last one is gone; a GPU's are told by torch's caching allocator.
//
// Threads without a scope (workers of data loaders, of at::parallel_for) are not counted, unless a
// ledger was made the default: then they go there, under `other`. CPU backward runs on the calling
// thread, under its scope, a GPU's on threads of autograd (AutogradScope). Not seen: memory of
// numpy, shared memory, scratch that oneDNN and MKL take for themselves, and growth of tensors that
// were made before the first Ledger. A forked child's allocations are nobody's until it makes a
// ledger of its own.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "poise/export.h"
#include "poise/memory_accounts.h"
#include "poise/stream.h"

namespace poise::memory {

struct Snapshot {
  std::int64_t current_bytes = 0;
  std::int64_t peak_bytes = 0;                    // highest total since reset_peak()
  std::array<std::int64_t, kAccounts> current{};  // bytes by account now
  std::array<std::int64_t, kAccounts>
      at_peak{};  // by account at the total peak; sums to peak_bytes
  std::array<std::int64_t, kAccounts> own_peak{};  // each account's own highest
};

class LedgerState;

// One run's (one rank's) books. Cheap to make; safe to use from several threads.
class POISE_API Ledger {
 public:
  Ledger();
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Counts this device's memory instead of the CPU's; before anything is counted. Where a GPU's
  // allocator is not torch's own nothing is counted, which is said once. Throws Error: no such GPU.
  void set_device(c10::Device device);

  Snapshot snapshot() const;
  void reset_peak();

  // On a GPU: the limit of torch's allocator for the whole process, so that it holds for what the
  // allocator keeps for later, too; gone with the ledger. On the CPU:
  // an allocation of this ledger that would take the total above `bytes` throws torch's
  // OutOfMemoryError (in Python torch.OutOfMemoryError), with requested, held and budget in the
  // message; the process goes on. 0: no limit. May be set below what is held: then nothing more
  // fits.
  void set_budget(std::int64_t bytes);
  std::int64_t budget() const;

  // CPU allocations of threads without a scope go here, until another ledger is made the default or
  // this one is gone.
  void make_default();

  const std::shared_ptr<LedgerState>& state() const { return state_; }

 private:
  std::shared_ptr<LedgerState> state_;
};

// While it lives, this thread's allocations go to `ledger` under `account`. Scopes nest; a stream's
// work runs under the scope of the thread that submitted it.
class POISE_API AccountScope {
 public:
  AccountScope(const Ledger& ledger, Account account);
  explicit AccountScope(Account account);  // same ledger as the enclosing scope
  ~AccountScope();
  AccountScope(const AccountScope&) = delete;
  AccountScope& operator=(const AccountScope&) = delete;

  // The innermost scope of this thread, to be reopened on another thread.
  struct Position {
    std::shared_ptr<LedgerState> ledger;  // null: none
    Account account = Account::other;
  };
  static Position current();
  explicit AccountScope(const Position& position);

 private:
  Position previous_;
};

// While it lives, what threads without a scope allocate on the ledger's GPU goes to it: autograd
// runs backward of a GPU's tensors on threads of its own, one for each GPU. Nothing on the CPU.
class POISE_API AutogradScope {
 public:
  AutogradScope(const Ledger& ledger, Account account);
  ~AutogradScope();
  AutogradScope(const AutogradScope&) = delete;
  AutogradScope& operator=(const AutogradScope&) = delete;

 private:
  const c10::Device device_;
  AccountScope::Position previous_;
};

// For Stream's constructor: its operations run under the scope that submit() was called under.
POISE_API Stream::Capture scope_capture();

// A GPU's figures: requested bytes of the whole process, all under `other`. Throws Error where
// there is no such device.
POISE_API Snapshot cuda_snapshot(int device);
POISE_API void reset_cuda_peak(int device);

// "20GiB", "512MiB", "1.5GB", "1048576" -> bytes. Case and spaces do not matter. Throws Error.
POISE_API std::int64_t parse_bytes(const std::string& text);
// 1610612736 -> "1.50 GiB".
POISE_API std::string format_bytes(std::int64_t bytes);

}  // namespace poise::memory
