// A rank that has no data for a micro-batch follows the ranks that have: it takes part in their
// collectives with zeros and runs no forward.
//
// [Note: following] With sharded parameters the sequence of collectives is what the model does, and
// only ranks that run it know it. All ranks know the counts of a window, so all know in which
// micro-batches somebody follows; there the first rank that runs says each collective before it is
// issued, in a broadcast of its own, and the others listen. Nothing is said where nobody follows.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "poise/comm.h"

namespace poise::zero {

class Following {
 public:
  enum class Operation : std::int64_t { gather, join, agree, end };
  struct Said {
    Operation operation;
    int index;  // unit of a gather, flat of a join
  };

  explicit Following(comm::Group& group) : group_(group) {}

  // For the micro-batches from now on: who says what is issued; none: nobody follows.
  void set_leader(std::optional<int> rank);

  // Ranks that run, before each collective that followers must know of.
  void say(Operation operation, int index = 0);
  // Ranks that follow.
  Said listen();

 private:
  struct Word {
    at::Tensor numbers;
    Event sent;
  };
  Word broadcast(Said said);

  comm::Group& group_;
  std::optional<int> leader_;
  std::vector<Word> words_;  // kept until they are sent: a GPU reads them later
};

}  // namespace poise::zero
