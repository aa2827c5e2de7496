// A message from each rank to each over gloo, for a group that is to talk over NCCL: connections of
// gloo tell a rank that died before it made its group from one that is still to make it.
#pragma once

#include <future>
#include <memory>
#include <optional>

#include "comm/c10d_calls.h"
#include "comm/messages.h"

namespace poise::comm {

class Greeting {
 public:
  // `tag`: as for the messages of a group on the CPU.
  Greeting(c10d_calls::BackendPtr gloo, int rank, int size, int tag);
  ~Greeting() { stop(); }
  Greeting(const Greeting&) = delete;
  Greeting& operator=(const Greeting&) = delete;

  // A rank whose connection broke before all had greeted. Said once, on one thread.
  std::optional<PeerFailure> lost();

  void stop() noexcept { messages_->stop(); }  // from any thread

 private:
  const std::shared_ptr<Messages> messages_;
  std::future<void> all_;
};

}  // namespace poise::comm
