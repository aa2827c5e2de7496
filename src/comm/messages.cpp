// Sends and receives over a c10d backend.
#include "comm/messages.h"

#include <algorithm>
#include <utility>

#include "comm/flat.h"

namespace poise::comm {

std::vector<Message> pieces_of(const at::Tensor& bytes, int rank, int size) {
  std::vector<Message> all;
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    all.push_back({peer, piece_of(bytes, peer, size)});
  }
  return all;
}

std::vector<Message> copies_of(const at::Tensor& bytes, int rank, int size) {
  std::vector<Message> all;
  for (int step = 1; step < size; ++step) all.push_back({(rank + step) % size, bytes});
  return all;
}

Messages::Messages(c10d_calls::BackendPtr backend, std::chrono::milliseconds timeout)
    : backend_(std::move(backend)), timeout_(timeout) {}

void Messages::exchange(const std::vector<Message>& received, const std::vector<Message>& sent,
                        int tag) {
  struct Clear {  // dropping a work ends it: nothing is written to its tensor any more
    Messages& messages;
    ~Clear() {
      const std::lock_guard lock(messages.mutex_);
      messages.in_flight_.clear();
    }
  } clear{*this};
  start(received, sent, tag);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  for (const InFlight& one : in_flight_) wait(one, deadline);  // only this thread changes the list
}

void Messages::start(const std::vector<Message>& received, const std::vector<Message>& sent,
                     int tag) {
  const std::lock_guard lock(mutex_);
  if (stopped_) throw Stopped();
  const auto each = [&](const std::vector<Message>& messages, auto call) {
    for (const Message& message : messages) {
      if (message.bytes.numel() == 0) continue;
      try {
        in_flight_.push_back({message.peer, call(*backend_, message.bytes, message.peer, tag)});
      } catch (const std::exception& error) {
        throw PeerFailure(message.peer, false, c10d_calls::message_of(error));
      }
    }
  };
  each(received, c10d_calls::receive);
  each(sent, c10d_calls::send);
}

void Messages::wait(const InFlight& one, std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  const auto now = std::chrono::steady_clock::now();
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - now);
  try {
    if (one.work->wait(std::max(left, milliseconds(1)))) return;  // 0 would mean no limit
  } catch (const std::exception& error) {
    throw PeerFailure(one.peer, std::chrono::steady_clock::now() >= deadline,
                      c10d_calls::message_of(error));
  }
  throw Stopped();
}

void Messages::stop() noexcept {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  for (const InFlight& one : in_flight_) one.work->abort();
}

}  // namespace poise::comm
