// What NCCL does with data, in pieces that fit in the slots of Peers. An attempt goes as far as the
// other ranks let it and returns whether all is done.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "peers.h"

namespace pretend_gpu {

std::size_t bytes_of(ncclDataType_t type);  // 0: not there
bool has_sums(ncclDataType_t type);

enum class Kind { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, reduce };

struct CollectiveCall {
  Kind kind;
  const void* from;
  void* to;
  std::size_t count;  // elements of a rank's part
  ncclDataType_t type;
  ncclRedOp_t operation = ncclSum;
  int root = 0;
};

class CollectiveTransfer {
 public:
  CollectiveTransfer(Peers& peers, const CollectiveCall& call);
  bool attempt();

 private:
  bool all_have_read() const;
  bool all_have_written();
  void write();
  void read();

  Peers& peers_;
  const CollectiveCall call_;
  const bool parts_;         // this rank brings a part for each rank
  std::size_t piece_;        // elements of a part that fit at once
  std::size_t done_ = 0;     // elements of a part
  bool written_ = false;     // this piece
  bool complained_ = false;  // of ranks that are in another collective
};

// One message between two ranks.
struct PairTransfer {
  Peers* peers;
  bool sends;
  void* data;
  std::size_t bytes;
  int peer;
  std::size_t done = 0;

  bool attempt();
};

}  // namespace pretend_gpu
