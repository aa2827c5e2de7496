// Watches over the ranks of a group in several processes: a thread with a store connection of its
// own beats about once a second, watches the next rank's beat (around the ring: the nearest living
// rank before a dead one sees it), and reads the one failure of the group. It needs no lock of
// Python's, so a rank that is merely busy goes on beating.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend.h"
#include "comm/c10d_calls.h"

namespace poise::comm {

// For ranks that need each other's end: see linger.
inline constexpr std::chrono::seconds kLinger{10};

struct WatchSettings {
  std::chrono::milliseconds period{1000};
  std::chrono::milliseconds patience{10 * 1000};  // without a beat: the rank is gone
  std::chrono::milliseconds answer{2500};         // what a question to the store may take
  std::chrono::milliseconds linger{0};            // how long the end lets the others finish first
};

// Whom it watches.
struct Watched {
  int rank = 0;
  int size = 1;
  Numbers numbers = {};
  // Host and pid of each, where all have come: who does not beat then is gone. Empty: who does not
  // beat yet may be slow to start.
  std::vector<std::string> names = {};
};

class Watch {
 public:
  // `store` holds keys of this group alone. This rank has beaten once when it returns.
  Watch(c10d_calls::StorePtr store, Watched watched, WatchSettings settings);
  ~Watch() { end(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // `failed` is called once with the group's failure, on the thread or, where there is one already,
  // here.
  void tell(std::function<void(const std::string&)> failed);
  void check() const;  // throws the failure, if there is one

  // The first rank that has not begun to beat; nullopt: all have. One thread at a time.
  std::optional<int> awaited();

  // Says goodbye and ends the thread; whether all ranks have said it within `linger`.
  bool end();

  void enter(const Call& call);  // this rank is now in it
  void leave();                  // for the wording of errors only

  // Makes this the group's failure, unless there is one already. Blocks for `answer` at most.
  void publish(const std::string& message) noexcept;
  // The group's failure, waiting up to `answer` for one.
  std::optional<std::string> failure();
  // How long it may take until the loss of a rank is the group's failure.
  std::chrono::milliseconds time_to_notice() const;
  // What `rank` is in, or was in last: "in collective 7, ..."; "in an unknown place" without
  // answer.
  std::string place_of(int rank);
  // "rank 2 (host a, pid 17)"
  std::string name_of(int rank) const;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;  // shared with the thread: it may hang in the network
  std::thread thread_;
  std::thread answers_;  // sees that the other one gets some
  int met_ = 0;          // ranks before this one have begun to beat
};

}  // namespace poise::comm
