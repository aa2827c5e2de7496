// Joins the gradients of all ranks, flat by flat, while backward goes on.
//
// [Note: order of reduces] What the ranks send must not depend on their data, or they would mix
// buffers: a parameter may go unused on one rank only. So flats are joined strictly in reverse
// order of units (that of "rest", whose parameters are used first and last, at the end), each once
// per micro-batch that joins, zeros for gradients that did not come. A gradient that comes after
// its flat went (reentrant checkpointing of a parameter used twice) is joined in a second round at
// the end. Small neighbours travel together (bucket.h), where that order is known: not by units.
//
// That there will be such a round is not known to a rank that has no micro-batch. The others leave
// it a note before they join the last flat, which they keep for the end of backward: who has joined
// that one finds the note.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <string>
#include <vector>

#include "poise/comm.h"
#include "zero/bucket.h"
#include "zero/flat_store.h"
#include "zero/following.h"

namespace poise::zero {

// Gradients of one flat that are being added up; an entry's place is garbage until it arrived.
struct Pile {
  at::Tensor sum;             // [whole] fp32 (or the parameters' type, on one rank)
  std::vector<char> arrived;  // by place of the entry in its flat
};

class Reducer {
 public:
  Reducer(const ParamTable& table, FlatStore& store, const Shards& shards, comm::Group& group,
          const config::ZeroPolicy& policy, Following& following, const memory::Ledger& ledger);

  void start_window();
  // Whether this micro-batch's gradients are joined with those of the other ranks.
  void begin_micro_batch(bool joins);
  // Where an entry's gradient goes now. Mark it as arrived, then call added().
  Pile& pile_of(int flat);
  void added(int entry);
  int place_of(int entry) const { return place_[static_cast<std::size_t>(entry)]; }
  // Where parameters are sharded: the backward of a unit has ended.
  void join_unit(int unit);
  // A rank that follows: the flat is joined with what came here, so with zeros. The order is that
  // of the ranks that run.
  void join_flat(int flat);
  // The end of a micro-batch, and of the window's joins, on such a rank.
  void end_following();
  // After end_micro_batch() on a rank that ran no backward: the others' second round.
  void follow_late();
  // Drops gradients that are not yet joined: their micro-batch failed.
  void drop_unjoined();
  // Joins what was not joined yet; no gradient may come afterwards.
  void end_micro_batch();
  // On one rank: zeros in the accumulators where no gradient came in the whole window.
  void zero_what_never_came();
  // Whether the window's gradients are all joined.
  bool window_joined() const { return window_joined_; }

 private:
  struct FlatState {
    // The accumulator; unused where every micro-batch is joined. Its sum is set where it is asked
    // for if it comes and goes.
    Pile window;
    Pile transient;              // this micro-batch's, made at its first gradient
    std::vector<char> came;      // in this micro-batch, by place
    int missing = 0;             // gradients of this micro-batch that have not come
    bool submitted = false;      // in this micro-batch
    bool shard_written = false;  // in this window
  };
  struct Flight {
    int flat;
    at::Tensor sum;   // kept until it lands
    at::Tensor wire;  // what travels: the sum, or a 16-bit copy of it
    bool adds;        // the result is to be added to the shard; else it is where it belongs
    Event event;
    const Bucket* bucket = nullptr;  // the sum is that of its flats
  };
  FlatState& state(int flat) { return flats_[static_cast<std::size_t>(flat)]; }
  const ParamTable::Flat& layout(int flat) const {
    return table_.flats()[static_cast<std::size_t>(flat)];
  }
  bool waits_for_end(int flat) const;
  void hand_back(int flat);
  bool ready(int flat);
  void submit_ready();
  std::string late_note(const std::string& flats) const;
  void submit(int flat, Pile& pile, bool transient);
  void pack(const Bucket& bucket, int flat, Pile& pile, bool transient);
  std::string name_of(const std::string& units) const;
  at::Tensor on_wire(const at::Tensor& sum);
  void land_first();
  void land_all();
  void land(const Flight& flight);
  void put_into_shard(int flat, const at::Tensor& sum, bool transient);

  const ParamTable& table_;
  FlatStore& store_;
  const Shards& shards_;
  comm::Group& group_;
  const bool overlap_;
  const bool half_wire_;  // gradients travel in bf16
  Following& following_;
  const memory::Ledger& ledger_;
  std::vector<int> order_;  // flats in order of their reduces
  std::vector<int> place_;  // by entry: its place in its flat
  std::vector<FlatState> flats_;
  Buckets buckets_;
  at::Tensor packed_;  // the bucket that fills
  std::deque<Flight> flights_;
  std::size_t next_ = 0;  // in order_
  std::size_t last_ = 0;  // in order_: the last one that travels
  std::int64_t micro_batch_ = 0;
  bool joins_ = false;
  bool window_joined_ = false;
};

}  // namespace poise::zero
