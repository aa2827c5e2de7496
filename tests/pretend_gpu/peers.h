// What the ranks of a communicator of nccl.cpp share: memory, with a slot for each rank's part of a
// collective and a slot for each pair of ranks.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pretend_gpu {

inline constexpr int kMostRanks = 8;
inline constexpr std::size_t kSlotBytes = std::size_t{1} << 20;
inline constexpr std::size_t kPairBytes = std::size_t{64} << 10;

// What a rank is in, for the others to compare with theirs.
struct Collective {
  int kind;
  int type;
  int operation;
  int root;
  std::uint64_t count;
  bool operator==(const Collective&) const = default;
};

// Counts of pieces. A piece is read after it was written, and written over after it was read.
struct Side {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> read;
  Collective collective;
};

class Peers {
 public:
  // Waits until all have come. The first of them makes the memory `name`, the last takes the name
  // away. As in NCCL that has no end where one died before it came. False: one that had come has
  // ended.
  bool meet(const std::string& name, int rank, int size);
  static bool fails_to_meet();  // a test wants it to, on this rank
  // This rank needs the others no more.
  void leave() { shared_->left[rank_] = true; }
  bool all_have_left() const;  // or ended

  int rank() const { return rank_; }
  int size() const { return size_; }
  Side& side(int rank) const { return shared_->sides[rank]; }
  char* slot(int rank) const { return shared_->slots[rank]; }
  Side& pair(int from, int to) const { return shared_->pairs[from][to]; }
  char* pair_slot(int from, int to) const { return shared_->pair_slots[from][to]; }

 private:
  struct Shared {
    std::atomic<int> come;
    std::atomic<pid_t> pids[kMostRanks];
    std::atomic<bool> left[kMostRanks];
    Side sides[kMostRanks];
    Side pairs[kMostRanks][kMostRanks];
    alignas(64) char slots[kMostRanks][kSlotBytes];
    char pair_slots[kMostRanks][kMostRanks][kPairBytes];
  };

  Shared* shared_ = nullptr;  // stays mapped: queued work may still name it
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace pretend_gpu
