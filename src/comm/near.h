// Ranks that are processes of one machine: they read each other's memory where it lies
// (process_vm_readv, as MPI libraries do for large messages) and meet at a page of memory that each
// shows the others. One copy by the reader, and nobody's thread needed but the one that waits,
// where a socket takes two copies and wakes two threads at each end. Linux gives the right to root,
// and to the same user where kernel.yama.ptrace_scope is 0. POISE_NEAR_MEMORY=off leaves it alone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace poise::comm {

// A process as its peers find it; sent to them byte by byte.
struct NearProcess {
  std::uint64_t machine = 0;  // boot and process namespace: where the pid means this process
  std::int64_t pid = 0;
  std::int64_t descriptor = 0;  // of its page
  std::uint64_t address = 0;    // of a number that only this process has
  std::uint64_t number = 0;
};

class NearRanks {
 public:
  using Record = std::array<std::int64_t, 2>;

  NearRanks(int rank, std::chrono::milliseconds timeout);
  ~NearRanks();
  NearRanks(const NearRanks&) = delete;
  NearRanks& operator=(const NearRanks&) = delete;

  const NearProcess& self() const { return self_; }

  // Finds the others; false: one of them cannot be read. Called once.
  bool find(const std::vector<NearProcess>& ranks) noexcept;

  // Shows this rank's record and waits for those of the others. What a rank wrote before is there
  // for those that it has met. Throws PeerFailure (one ended, left, or did not come in time) and
  // Stopped. One thread at a time, like read().
  void meet(std::vector<Record>& records);

  // Copies `bytes` from `address` of a rank. Throws PeerFailure and Stopped.
  void read(int rank, std::uint64_t address, void* target, std::int64_t bytes) const;

  // From any thread, for good: no wait lasts any more, here and where others wait for this rank.
  void stop() noexcept;

 private:
  struct Page;
  struct Peer {
    std::int64_t pid = 0;
    int process = -1;            // a descriptor that tells when it has ended
    const Page* page = nullptr;  // null: this rank itself
  };

  bool find_one(const NearProcess& other, Peer& peer) const noexcept;
  void wait_for(int rank, std::chrono::steady_clock::time_point deadline) const;

  const int rank_;
  const std::chrono::milliseconds timeout_;
  std::uint64_t number_ = 0;
  Page* page_ = nullptr;  // null: this system has none of it
  NearProcess self_;
  std::vector<Peer> peers_;
  std::uint32_t round_ = 0;
  std::atomic<bool> stopped_ = false;
};

}  // namespace poise::comm
