// A rank that runs no forward, because it has no data for a micro-batch or ran out of memory in
// this window, follows the ranks that do: it takes part in their collectives with zeros.
//
// [Note: following] What a window's collectives are is what the model does, and only ranks that run
// it know it. So every rank keeps a log of the steps it takes in a window: the same steps in the
// same order on all of them. A rank that follows reads the steps from there on, where its own log
// ends, in notes that the others leave beside the collectives. They are left where it is known that
// somebody follows (ranks have different numbers of micro-batches, which all know), and from the
// moment on when a rank, waiting for a collective, finds the note of one that ran out of memory.
// Otherwise the log costs a few bytes and nobody looks.
//
// If no rank is left that runs, each goes on to where the longest log ends; there the window ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "poise/comm.h"
#include "zero/lookout.h"

namespace poise::zero {

class Following {
 public:
  enum class Operation : std::int64_t {
    begin_micro_batch,  // index: 1 where its gradients are joined
    agree,              // on the weights of losses
    gather,             // index: unit
    join,               // index: flat
    end_micro_batch,
    end_window,
  };
  struct Step {
    Operation operation;
    std::int64_t index = 0;
  };

  // `run`: a word without spaces that no run over this group has had before, the same on all ranks.
  // `timeout`: how long a rank that follows waits for the next step. `looks`: who looks for notes
  // of ranks that ran out of memory: waits for other ranks, or a thread, since on a GPU the host
  // waits anywhere.
  enum class Looks { in_waits, by_thread };
  Following(comm::Group& group, std::string run, std::chrono::milliseconds timeout, Looks looks)
      : group_(group), run_(std::move(run)), timeout_(timeout), looks_(looks) {}

  // A window begins, the same one on all ranks.
  void begin_window();
  // All ranks have met at the end of one.
  void end_window();
  // One is dropped before its end.
  void drop_window() { lookout_.reset(); }

  // Before each step, once nothing can fail before the others hear of it.
  void take(Operation operation, std::int64_t index = 0);
  // The steps from now on are left for ranks that follow.
  void publish();

  // Waits for other ranks, in a window.
  void wait(const Event& event);
  void synchronize(const Event& event);  // blocks on a GPU, too

  // This rank has no further data in this window, and follows from now on.
  void follow();
  // The same since it ran out of memory.
  void lose(const std::string& why);
  // The next step, which this rank is to take; none: no rank runs any more, and none has gone
  // further. Throws Error where none comes within the timeout.
  std::optional<Step> next();
  // A text that says it is of this window, as notes of an earlier one may still be there.
  std::string stamped(const std::string& text) const;
  // What `rank` said when it ran out of memory in this window.
  std::string loss_of(int rank) const;

 private:
  void leave(std::size_t position);
  void leave_all();
  void leave_end(const std::string& why);
  void look();
  bool looks_now() const;
  std::optional<Step> read(std::size_t position) const;
  bool all_follow_from_here() const;

  std::optional<std::string> note(const std::string& key) const;

  comm::Group& group_;
  const std::string run_;
  const std::chrono::milliseconds timeout_;
  const Looks looks_;
  mutable std::mutex mutex_;  // over what follows, where a thread looks, too
  std::int64_t window_ = 0;
  std::vector<Step> log_;  // of this window
  bool publishing_ = false;
  bool follows_ = false;
  bool left_all_ = false;  // that this rank ran
  bool has_notes_ = true;
  std::unique_ptr<Lookout> lookout_;  // the last member: it ends first
};

}  // namespace poise::zero
