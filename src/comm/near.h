// Memory of other ranks on this machine, read where it lies (process_vm_readv, as MPI libraries do
// for large messages): one copy, by the reader, where a socket needs two and a thread at each end.
// Linux gives that right to root, and to the same user where kernel.yama.ptrace_scope is 0.
// POISE_NEAR_MEMORY=off leaves it alone.
#pragma once

#include <cstdint>

namespace poise::comm {

// A process as its peers find it; sent to them byte by byte.
struct NearProcess {
  std::uint64_t machine = 0;  // boot and process namespace: where the pid means this process
  std::int64_t pid = 0;
  std::uint64_t address = 0;  // of a number that only this process has
  std::uint64_t number = 0;
};

class NearMemory {
 public:
  NearMemory();
  NearMemory(const NearMemory&) = delete;
  NearMemory& operator=(const NearMemory&) = delete;

  const NearProcess& self() const { return self_; }

  // Whether this process may read that one: tried, with its number.
  bool reads(const NearProcess& other) const noexcept;

  // Copies `bytes` from `address` of process `pid`. Throws std::system_error: it is gone, or has
  // no such memory.
  static void read(std::int64_t pid, std::uint64_t address, void* target, std::int64_t bytes);

 private:
  std::uint64_t number_ = 0;
  NearProcess self_;
};

}  // namespace poise::comm
