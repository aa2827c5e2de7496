// The two-phase rendezvous. Every rank counts its arrivals; a phase is over when all counts reached
// it. A failure lets nobody start to read, and whoever throws it waits for those that still read:
// after the throw the tensors are their owner's again.
#include "comm/meeting.h"

#include <algorithm>
#include <utility>

#include "poise/error.h"

namespace poise::comm {

Meeting::Meeting(int size, std::chrono::milliseconds timeout, Numbers numbers)
    : timeout_(timeout), numbers_(std::move(numbers)), seats_(static_cast<std::size_t>(size)) {}

void Meeting::fail(const std::string& message) noexcept {
  const std::lock_guard lock(mutex_);
  fail_locked(message);
}

void Meeting::fail_locked(const std::string& message) noexcept {
  if (!failure_) failure_ = message;
  changed_.notify_all();
}

void Meeting::depart(int rank) noexcept {
  const std::lock_guard lock(mutex_);
  seats_[static_cast<std::size_t>(rank)].departed = true;
  changed_.notify_all();
}

void Meeting::check() const {
  Lock lock(mutex_);
  if (failure_) throw_failure(lock);
}

void Meeting::throw_failure(Lock& lock) const {
  changed_.wait(lock, [&] {
    return std::none_of(seats_.begin(), seats_.end(), [](const Seat& s) { return s.reading; });
  });
  throw Error(*failure_);
}

bool Meeting::all_here(std::int64_t phase) const {
  return std::all_of(seats_.begin(), seats_.end(),
                     [&](const Seat& seat) { return seat.arrivals >= phase; });
}

std::optional<int> Meeting::departed_before(std::int64_t phase) const {
  for (int rank = 0; rank < size(); ++rank) {
    const Seat& seat = seats_[static_cast<std::size_t>(rank)];
    if (seat.departed && seat.arrivals < phase) return rank;
  }
  return std::nullopt;
}

std::string Meeting::missing(std::int64_t phase) const {
  std::string text;
  for (int rank = 0; rank < size(); ++rank) {
    const Seat& seat = seats_[static_cast<std::size_t>(rank)];
    if (seat.arrivals >= phase) continue;
    text = join(text, text.empty() ? "" : ", ", "rank ", numbers_.of(rank),
                seat.arrivals == 0 ? " (has submitted nothing)"
                                   : join(" (last in ", describe(seat.call), ")"));
  }
  return text;
}

void Meeting::arrive(Lock& lock, int rank) {
  if (failure_) throw_failure(lock);
  Seat& seat = seats_[static_cast<std::size_t>(rank)];
  const std::int64_t phase = ++seat.arrivals;
  const bool entering = phase % 2 == 1;
  if (all_here(phase)) {
    if (entering) compare();  // by the last one to come, for all
    changed_.notify_all();
  }
  const bool in_time = changed_.wait_for(lock, timeout_, [&] {
    return failure_.has_value() || all_here(phase) || departed_before(phase).has_value();
  });
  // Where all have read, the collective is over for all, whatever ends the group afterwards.
  if (all_here(phase) && (!entering || !failure_)) return;
  if (failure_) throw_failure(lock);
  if (in_time) {
    fail_locked(join("[comm] rank ", numbers_.of(*departed_before(phase)),
                     " left the group while rank ", numbers_.of(rank), " was in ",
                     describe(seat.call), "; all ranks must submit the same sequence"));
  } else {
    fail_locked(join("[comm] rank ", numbers_.of(rank), " waited ", timeout_.count() / 1000.0,
                     " s in ", describe(seat.call), " for ", missing(phase),
                     "; find what holds them up, or raise the timeout"));
  }
  throw_failure(lock);
}

void Meeting::compare() {
  for (int rank = 1; rank < size(); ++rank) {
    const Call& first = seats_[0].call;
    const Call& other = seats_[static_cast<std::size_t>(rank)].call;
    if (other == first) continue;
    fail_locked(differing(numbers_.of(0), describe(first), numbers_.of(rank), describe(other)));
    return;
  }
}

void Meeting::stop_reading(int rank) {
  const std::lock_guard lock(mutex_);
  seats_[static_cast<std::size_t>(rank)].reading = false;
  changed_.notify_all();
}

Meeting::Visit::Visit(Meeting& meeting, int rank, const Call& call, const void* brought)
    : meeting_(meeting), rank_(rank) {
  Lock lock(meeting_.mutex_);
  Seat& seat = meeting_.seats_[index(rank)];
  seat.call = call;
  seat.brought = brought;
  meeting_.arrive(lock, rank);
  seat.reading = true;
}

Meeting::Visit::~Visit() { meeting_.stop_reading(rank_); }

void Meeting::Visit::leave() {
  Lock lock(meeting_.mutex_);
  meeting_.seats_[index(rank_)].reading = false;
  meeting_.changed_.notify_all();
  meeting_.arrive(lock, rank_);
}

}  // namespace poise::comm
