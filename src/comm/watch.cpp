// The threads of the watch. One asks the store: keys "failure", "beat/<rank>", "name/<rank>",
// "done" (a count). The other sees that the first waits for an answer too long: its calls have no
// limit, and the process that holds the store may have been stopped.
#include "comm/watch.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "comm/beat.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

using Clock = std::chrono::steady_clock;
using ::c10d::Store;

constexpr std::chrono::seconds kJoin{5};  // for a thread that hangs in the network

std::optional<std::string> read(Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return store.get_to_str(key);
}

std::string key_of(const char* kind, int rank) { return join(kind, '/', rank); }

}  // namespace

struct Watch::State {
  State(c10d_calls::StorePtr store, Watched watched, WatchSettings settings)
      : store(std::move(store)),
        rank(watched.rank),
        size(watched.size),
        numbers(std::move(watched.numbers)),
        settings(settings),
        all_have_come(!watched.names.empty()),
        names(std::move(watched.names)) {
    names.resize(static_cast<std::size_t>(size));
    this->store->set(key_of("name", rank), own_name());
    this->store->set(key_of("beat", rank), text_of(own));
  }

  // Something the thread does with its connection on behalf of another.
  struct Job {
    std::function<void(Store&)> work;
    bool done = false;
  };

  // Runs `work` on the thread. False: no answer in time, or the thread is gone.
  bool ask(std::function<void(Store&)> work) {
    std::unique_lock lock(mutex);
    const auto job = std::make_shared<Job>(Job{std::move(work)});
    jobs.push_back(job);
    changed.notify_all();
    changed.wait_for(lock, settings.answer, [&] { return job->done || ended; });
    return job->done;
  }

  void serve(std::unique_lock<std::mutex>& lock) {
    while (!jobs.empty()) {
      const auto job = jobs.front();
      jobs.pop_front();
      lock.unlock();
      asking([&] { job->work(*store); });
      lock.lock();
      job->done = true;
      changed.notify_all();
    }
  }

  // Every question by itself: those of a large group together may take longer than one may.
  template <class Question>
  void asking(Question question) {
    {
      const std::lock_guard lock(mutex);
      asked = Clock::now();
    }
    question();
    const std::lock_guard lock(mutex);
    asked = std::nullopt;
  }

  std::optional<std::string> look_up(const std::string& key) {
    std::optional<std::string> found;
    asking([&] { found = read(*store, key); });
    return found;
  }

  // On the other thread, until the watch ends.
  void wait_for_answers() {
    std::unique_lock lock(mutex);
    auto last = Clock::now();
    while (!changed.wait_for(lock, settings.period, [&] { return stopping || ended; })) {
      const auto now = Clock::now();
      // Time in which this rank slept itself does not count.
      if (now - last > settings.patience / 2 && asked) asked = now;
      last = now;
      if (!asked || now - *asked <= settings.patience) continue;
      lock.unlock();
      report(join("[comm] the store of the group has not answered for ",
                  settings.patience.count() / 1000.0, " s; its host, ", named(0),
                  " or the launcher, was stopped or is out of reach: look at both"));
      return;
    }
  }

  void round() {
    learn_names();
    if (const auto message = look_up("failure")) report(*message);
    Beat mine;
    {
      const std::lock_guard lock(mutex);
      ++own.pulse;
      mine = own;
    }
    asking([&] { store->set(key_of("beat", rank), text_of(mine)); });
    if (!reported) look_at_next(mine);
  }

  void learn_names() {
    for (int other = 0; other < size && known < size; ++other) {
      if (!names[static_cast<std::size_t>(other)].empty()) continue;
      const auto name = look_up(key_of("name", other));
      if (!name) continue;
      const std::lock_guard lock(mutex);
      names[static_cast<std::size_t>(other)] = *name;
      ++known;
    }
  }

  void look_at_next(const Beat& mine) {
    int next = (rank + 1) % size;
    auto text = look_up(key_of("beat", next));
    // Where some are not there yet, which is slow to start and not gone, nobody else may look at
    // the one after them.
    while (!text && !all_have_come) {
      next = (next + 1) % size;
      if (next == rank) return;
      text = look_up(key_of("beat", next));
    }
    const Beat theirs = text ? beat_of(*text) : Beat();
    const auto now = Clock::now();
    // A whole job that was stopped goes on together: time in which this rank slept does not count.
    const bool slept = now - last_look > settings.patience / 2;
    last_look = now;
    const bool another = next != std::exchange(watched, next);
    if (theirs.pulse != last_pulse || slept || another) {
      last_pulse = theirs.pulse;
      last_seen = now;
    }
    if (theirs.left) {
      if (mine.entered > theirs.entered) {
        declare(join("[comm] ", named(next), " left the group after ", theirs.entered,
                     " collectives while rank ", numbers.of(rank), " is in ", mine.place,
                     "; all ranks must submit the same sequence"));
      }
    } else if (now - last_seen > settings.patience) {
      lost = 1;
      declare(join("[comm] ", named(next), " disappeared: no sign of life for ",
                   settings.patience.count() / 1000.0, " s, ",
                   theirs.entered == 0 ? "before any collective" : join("last in ", theirs.place),
                   "; look at its own output and at its machine's log"));
    } else if (mine.entered == theirs.entered && mine.place != theirs.place) {
      declare(differing(numbers.of(rank), mine.place, numbers.of(next), theirs.place));
    }
  }

  void declare(const std::string& message) {
    asking([&] { store->compareSet("failure", std::string(), message); });
    report(look_up("failure").value_or(message));
  }

  void report(const std::string& message) {
    if (reported.exchange(true)) return;
    {
      const std::lock_guard lock(mutex);
      failure = message;
    }
    const std::lock_guard lock(calling);
    call_once(message);
  }

  void call_once(const std::string& message) {
    if (const auto call = std::exchange(failed, nullptr)) call(message);
  }

  std::string named(int other) const {
    const std::lock_guard lock(mutex);
    const std::string& name = names[static_cast<std::size_t>(other)];
    const auto known = name.empty() ? "" : join(" (", name, ")");
    return join("rank ", numbers.of(other), known);
  }

  // Tells the others that this rank needs nothing more, and gives them time to say the same: this
  // process may host the store.
  void say_goodbye() {
    Beat last;
    {
      const std::lock_guard lock(mutex);
      own.left = true;
      ++own.pulse;
      last = own;
    }
    store->set(key_of("beat", rank), text_of(last));
    // After a failure not all may be there to say it; the others read the failure in a period. A
    // store that torch made is mostly rank 0's and ends with it.
    const bool failed_before = reported || store->check({"failure"});
    const std::chrono::milliseconds to_read = 3 * settings.period;
    const auto longest = !failed_before ? settings.linger
                         : rank == 0    ? to_read
                                        : std::min(settings.linger, to_read);
    const auto deadline = Clock::now() + longest;
    auto done = store->add("done", 1);
    while (done < size - lost && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      done = store->add("done", 0);
    }
    const std::lock_guard lock(mutex);
    all_have_left = done >= size;
  }

  const c10d_calls::StorePtr store;
  const int rank;
  const int size;
  const Numbers numbers;
  const WatchSettings settings;
  const bool all_have_come;

  std::mutex calling;
  std::function<void(const std::string&)> failed;  // null: nobody to tell yet, or any more

  mutable std::mutex mutex;
  std::condition_variable changed;
  Beat own;
  std::vector<std::string> names;
  std::optional<std::string> failure;
  std::deque<std::shared_ptr<Job>> jobs;
  std::optional<Clock::time_point> asked;  // since when the store owes an answer
  std::atomic<bool> reported = false;
  bool stopping = false;
  bool ended = false;
  bool all_have_left = false;

  // The thread's own.
  int known = 0;
  int watched = -1;
  int lost = 0;  // ranks that will not say goodbye
  std::int64_t last_pulse = -1;
  Clock::time_point last_seen = Clock::now();
  Clock::time_point last_look = Clock::now();
};

void Watch::run(const std::shared_ptr<State>& state) {
  State& my = *state;
  try {
    auto next_round = Clock::now();
    std::unique_lock lock(my.mutex);
    while (!my.stopping) {
      if (my.changed.wait_until(lock, next_round,
                                [&] { return my.stopping || !my.jobs.empty(); })) {
        my.serve(lock);
        continue;
      }
      lock.unlock();
      my.round();
      next_round = Clock::now() + my.settings.period;
      lock.lock();
    }
    my.serve(lock);
    lock.unlock();
    my.say_goodbye();
  } catch (const std::exception& error) {
    my.report(join("[comm] lost the store of the group; its host, ", my.named(0),
                   " or the launcher, has disappeared: ", c10d_calls::message_of(error),
                   "; look at the output of both"));
  }
  const std::lock_guard lock(my.mutex);
  my.ended = true;
  my.changed.notify_all();
}

Watch::Watch(c10d_calls::StorePtr store, Watched watched, WatchSettings settings)
    : state_(std::make_shared<State>(std::move(store), std::move(watched), settings)),
      thread_([state = state_] { run(state); }),
      answers_([state = state_] { state->wait_for_answers(); }) {}

void Watch::tell(std::function<void(const std::string&)> failed) {
  const std::lock_guard calling(state_->calling);
  state_->failed = std::move(failed);
  std::unique_lock lock(state_->mutex);
  if (!state_->failure) return;
  const auto message = *state_->failure;
  lock.unlock();
  state_->call_once(message);
}

void Watch::check() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->failure) throw Error(*state_->failure);
}

std::optional<int> Watch::awaited() {
  const auto met = std::make_shared<int>(met_);
  const bool answered = state_->ask([met, size = state_->size](Store& store) {
    while (*met < size && store.check({key_of("beat", *met)})) ++*met;
  });
  if (answered) met_ = *met;
  return met_ < state_->size ? std::optional(met_) : std::nullopt;
}

bool Watch::end() {
  if (!thread_.joinable()) return false;
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const auto longest = state_->settings.linger + kJoin;
  const bool ended = state_->changed.wait_for(lock, longest, [&] { return state_->ended; });
  const bool together = state_->all_have_left;
  lock.unlock();
  answers_.join();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();  // hangs in the network; it keeps its state and touches nothing else
    const std::lock_guard calling(state_->calling);
    state_->failed = nullptr;
  }
  return together;
}

void Watch::enter(const Call& call) {
  const std::lock_guard lock(state_->mutex);
  state_->own.entered = call.number + 1;
  state_->own.place = describe(call);
  state_->own.inside = true;
}

void Watch::leave() {
  const std::lock_guard lock(state_->mutex);
  state_->own.inside = false;
}

void Watch::publish(const std::string& message) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->failure) return;
  }
  state_->ask([message](Store& store) { store.compareSet("failure", std::string(), message); });
}

std::optional<std::string> Watch::failure() {
  const auto found = std::make_shared<std::optional<std::string>>();
  const auto deadline = Clock::now() + state_->settings.answer;
  do {
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->ended) return std::nullopt;  // nobody to ask; what it knew it has reported
    }
    if (!state_->ask([found](Store& store) { *found = read(store, "failure"); })) continue;
    if (*found) return *found;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (Clock::now() < deadline);
  return std::nullopt;
}

// A beat, a look and the news of a failure come a period late each.
std::chrono::milliseconds Watch::time_to_notice() const {
  return state_->settings.patience + 3 * state_->settings.period;
}

std::string Watch::place_of(int rank) {
  const auto found = std::make_shared<std::optional<std::string>>();
  const bool answered =
      state_->ask([found, rank](Store& store) { *found = read(store, key_of("beat", rank)); });
  if (!answered || !*found) return "in an unknown place";
  const Beat beat = beat_of(**found);
  if (beat.entered == 0) return "in no collective yet";
  return join(beat.inside ? "in " : "last in ", beat.place);
}

std::string Watch::name_of(int rank) const { return state_->named(rank); }

}  // namespace poise::comm
