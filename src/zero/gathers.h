// Makes flats whole on every rank of which each has brought its shard up to date, one after the
// other, small neighbours in one collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <vector>

#include "poise/comm.h"
#include "poise/memory.h"
#include "zero/bucket.h"
#include "zero/flat_store.h"

namespace poise::zero {

class Gathers {
 public:
  // References outlive this. Memory for buckets is taken here, once.
  Gathers(const ParamTable& table, FlatStore& store, const Shards& shards, const comm::Ranks& ranks,
          const memory::Ledger& ledger);

  // Of every trainable flat that is not sharded, in order of flats: submitted at once, or with the
  // last one of its bucket.
  void values(int flat);
  void gradient(int flat);  // its sums
  void wait();              // until all are there
  void drop() noexcept;     // an update failed

 private:
  struct Flight {
    const Bucket* bucket;
    at::Tensor tensor;
    std::vector<at::Tensor> wholes;  // by place in the bucket
    Event event;
  };
  void pack(const Bucket& bucket, int flat, const at::Tensor& whole, const char* what);
  void land();

  const ParamTable& table_;
  FlatStore& store_;
  const Shards& shards_;
  comm::Group& group_;
  const Buckets buckets_;
  std::array<at::Tensor, 2> memory_;  // kByte: one is filled while the other travels
  std::size_t next_ = 0;              // of memory_
  Flight open_ = {};                  // the bucket that fills
  std::deque<Flight> flights_;
  std::vector<Event> events_;  // of flats that travel by themselves
};

}  // namespace poise::zero
