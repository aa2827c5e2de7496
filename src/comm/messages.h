// Messages between the ranks of a gloo group. Every collective on the CPU is made of them and not
// of gloo's own: a wait for a message can be ended from another thread, which a gloo collective
// cannot, and it is known which peer broke. On loopback they are also faster from a few MB on (2 to
// 4 times gloo's own reduce-scatter and all-gather, 2 ranks), and alike below.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "comm/c10d_calls.h"

namespace poise::comm {

inline constexpr int kFirstTag = 0x706f6973;  // out of the way of the user's own tags

struct Message {
  int peer = 0;
  at::Tensor bytes;  // flat, kByte; empty ones are not sent
};

// One message per peer, nearest first, so that not all begin with rank 0: each peer's piece of
// `bytes`, or all of them to each.
std::vector<Message> pieces_of(const at::Tensor& bytes, int rank, int size);
std::vector<Message> copies_of(const at::Tensor& bytes, int rank, int size);

// A peer did not answer.
struct PeerFailure : std::runtime_error {
  PeerFailure(int peer, bool timed_out, const std::string& reason)
      : std::runtime_error(reason), peer(peer), timed_out(timed_out) {}
  int peer;
  bool timed_out;
};

// stop() came.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped"; }
};

class Messages {
 public:
  Messages(c10d_calls::BackendPtr backend, std::chrono::milliseconds timeout);

  // Blocks until all are through. Throws PeerFailure or Stopped; the tensors are then no longer
  // written to. One thread at a time; a message meets the one of equal place, peer and tag.
  void exchange(const std::vector<Message>& received, const std::vector<Message>& sent, int tag);

  void stop() noexcept;  // from any thread, for good

 private:
  struct InFlight {
    int peer;
    c10d_calls::WorkPtr work;
  };

  void start(const std::vector<Message>& received, const std::vector<Message>& sent, int tag);
  void wait(const InFlight& one, std::chrono::steady_clock::time_point deadline);

  c10d_calls::BackendPtr backend_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  bool stopped_ = false;
  std::vector<InFlight> in_flight_;
};

}  // namespace poise::comm
