// Where the threads of a group meet: twice per collective. Between the two meetings everybody may
// read what the others brought.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/backend.h"

namespace poise::comm {

class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds timeout, Numbers numbers = {});

  const Numbers& numbers() const { return numbers_; }
  int size() const { return static_cast<int>(seats_.size()); }
  void fail(const std::string& message) noexcept;  // first one wins
  void depart(int rank) noexcept;                  // this rank will bring nothing more
  void check() const;

  Notes& notes() { return notes_; }

  // One rank's time between the two. Made when all have come with the same call; else throws.
  class Visit {
   public:
    Visit(Meeting& meeting, int rank, const Call& call, const void* brought);
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

    const void* brought_by(int rank) const { return meeting_.seats_[index(rank)].brought; }
    // Waits until nobody reads any more.
    void leave();

   private:
    static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
    Meeting& meeting_;
    int rank_;
  };

 private:
  struct Seat {
    Call call;  // the last one
    const void* brought = nullptr;
    std::int64_t arrivals = 0;  // two per collective
    bool reading = false;
    bool departed = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  void arrive(Lock& lock, int rank);
  void compare();
  void fail_locked(const std::string& message) noexcept;
  [[noreturn]] void throw_failure(Lock& lock) const;
  bool all_here(std::int64_t phase) const;
  std::optional<int> departed_before(std::int64_t phase) const;
  std::string missing(std::int64_t phase) const;
  void stop_reading(int rank);

  const std::chrono::milliseconds timeout_;
  const Numbers numbers_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Seat> seats_;
  Notes notes_;
  std::optional<std::string> failure_;
};

}  // namespace poise::comm
