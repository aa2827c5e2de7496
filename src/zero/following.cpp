// The log of a window, and its notes, each stamped with the window it is of, since keys are used
// again: "step/<position>"; "lost", where a rank ran out of memory; "end/<rank>", the length of
// the log of a rank that follows, and why it lost its memory, if it did.
#include "zero/following.h"

#include <algorithm>
#include <sstream>
#include <thread>

#include "poise/error.h"
#include "poise/interrupt.h"

namespace poise::zero {
namespace {

// A wait that takes longer looks whether somebody is missing.
constexpr std::chrono::milliseconds kPatience{50};

std::string place_of(std::size_t position) { return join("step/", position); }
std::string end_of(int rank) { return join("end/", rank); }

}  // namespace

std::string Following::stamped(const std::string& text) const {
  return join(run_, " ", window_, " ", text);
}

// A note of this window, without its stamp.
std::optional<std::string> Following::note(const std::string& key) const {
  const auto text = group_.note(key);
  const auto stamp = stamped("");
  if (!text || text->rfind(stamp, 0) != 0) return std::nullopt;
  return text->substr(stamp.size());
}

void Following::begin_window() {
  lookout_.reset();
  log_.clear();
  publishing_ = false;
  follows_ = false;
  left_all_ = false;
  if (group_.size() > 1 && looks_ == Looks::by_thread) {
    lookout_ = std::make_unique<Lookout>(kPatience, [this] {
      const std::lock_guard lock(mutex_);
      if (!left_all_ && !follows_) look();
    });
  }
}

void Following::end_window() {
  lookout_.reset();
  ++window_;
}

void Following::publish() {
  const std::lock_guard lock(mutex_);
  publishing_ = true;
}

void Following::take(Operation operation, std::int64_t index) {
  const std::lock_guard lock(mutex_);
  if (group_.size() == 1 || follows_) return;  // next() has it already
  log_.push_back({operation, index});
  if (publishing_) leave(log_.size() - 1);
}

void Following::leave(std::size_t position) {
  const auto& step = log_[position];
  group_.leave_note(place_of(position),
                    stamped(join(static_cast<std::int64_t>(step.operation), " ", step.index)));
}

void Following::leave_all() {
  for (std::size_t position = 0; position < log_.size(); ++position) leave(position);
  left_all_ = true;
}

void Following::wait(const Event& event) {
  if (group_.device().is_cpu()) synchronize(event);  // on a GPU the host does not wait here
  event.wait();
}

void Following::synchronize(const Event& event) {
  while (looks_now() && !event.wait_for(kPatience)) look();
  event.synchronize();
}

bool Following::looks_now() const {
  return looks_ == Looks::in_waits && group_.size() > 1 && !left_all_ && !follows_;
}

void Following::look() {
  if (!has_notes_) return;
  try {
    if (!note("lost")) return;
    leave_all();
    publishing_ = true;
  } catch (const Error&) {  // a group that has failed, or has no store: nobody can follow there
    has_notes_ = false;
  }
}

void Following::follow() { leave_end(""); }

void Following::lose(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    leave_all();
  }
  leave_end(why);
  group_.leave_note("lost", stamped(""));
}

void Following::leave_end(const std::string& why) {
  const std::lock_guard lock(mutex_);
  group_.leave_note(end_of(group_.rank()), stamped(join(log_.size(), " ", why)));
  follows_ = true;
  publishing_ = false;  // what it takes from now on others have left
}

std::optional<Following::Step> Following::read(std::size_t position) const {
  const auto text = note(place_of(position));
  if (!text) return std::nullopt;
  std::istringstream stream(*text);
  std::int64_t operation = 0, index = 0;
  stream >> operation >> index;
  return Step{static_cast<Operation>(operation), index};
}

std::string Following::loss_of(int rank) const {
  const auto text = note(end_of(rank));
  return text ? text->substr(text->find(' ') + 1) : "";
}

bool Following::all_follow_from_here() const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto text = note(end_of(rank));
    if (!text || std::stoull(*text) > log_.size()) return false;
  }
  return true;
}

std::optional<Following::Step> Following::next() {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  for (auto pause = std::chrono::microseconds(20);;
       pause = std::min(2 * pause, std::chrono::microseconds(2000))) {
    if (const auto step = read(log_.size())) {
      log_.push_back(*step);
      return step;
    }
    if (!left_all_ && note("lost")) {  // who is behind may need what this rank ran
      const std::lock_guard lock(mutex_);
      leave_all();
    }
    if (all_follow_from_here()) return std::nullopt;
    group_.check();
    check_interrupt();
    if (std::chrono::steady_clock::now() > deadline) {
      fail("zero", "rank ", group_.rank(), " follows the others in step ", log_.size(),
           " of a window and heard of none for ", timeout_.count() / 1000.0,
           " s; find what holds them up, or raise comm.timeout_seconds");
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace poise::zero
