// Saving and resuming a run.
#include "cli/run_state.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "poise/best_save.h"
#include "poise/log.h"
#include "poise/memory.h"
#include "poise/state.h"
#include "poise/window_dropped.h"
#include "state/random.h"
#include "state/saver.h"

namespace poise::cli {
namespace {

constexpr std::chrono::milliseconds kLookEvery{50};

}  // namespace

RunState::RunState(const Config& config, Engine& engine, data::WindowLoader& loader, Report& report,
                   InterruptScope& interrupt)
    : config_(config),
      saves_(config.state.save_every > 0),
      engine_(engine),
      loader_(loader),
      report_(report),
      interrupt_(interrupt),
      directory_((std::filesystem::path(config.train.output_dir) / "state").string()) {
  if (!saves_) return;
  auto& group = engine.group();
  using SavesWait = InterruptScope::SavesWait;
  interrupt_.put_saves_off(group.size() == 1 ? SavesWait::in_waits : SavesWait::everywhere);
  if (group.size() == 1) return;
  // The store may still have the notes of a run that the launcher has started again.
  const auto words = group.all_gather_text(state::random_word(), "name of the run");
  asked_note_ = join("train/", words.front(), "/save_asked");
}

// What must be the same for a cursor to mean the same data.
std::string RunState::data_identity() const {
  const auto& sampler = loader_.sampler();
  return nlohmann::ordered_json{{"samples", sampler.size()},
                                {"seed", sampler.options().seed},
                                {"shuffle", sampler.options().order == data::Order::shuffled},
                                {"sequence_length", config_.model.sequence_length}}
      .dump();
}

void RunState::resume() {
  const auto& wanted = config_.state.resume;
  if (wanted == "none") return;
  auto path = wanted;
  if (wanted == "auto") {  // as rank 0 sees it
    path = engine_.group().all_gather_text(state::find(directory_), "the save to resume").front();
    if (path.empty()) {
      report_.begin_anew();
      report_.note("  no save in " + directory_ + ": a new run");
      return;
    }
  }
  const auto loaded = engine_.load(path);
  const auto text = [&](const char* key) {
    const auto found = loaded.user.find(key);
    return found == loaded.user.end() ? std::string() : found->second;
  };
  if (!loaded.cursor || text("data") != data_identity()) {
    fail("cli", loaded.path, " was made with other data: ", text("data"), ", and this run has ",
         data_identity(), "; resume with the same data and seed");
  }
  report_.go_on(text("report"));
  if (const auto best = text("best"); !best.empty()) {
    best_ = nlohmann::json::parse(best).get<double>();
  }
  loader_.seek(*loaded.cursor);
  owes_validation_ = !text("owes_validation").empty();
  if (wanted == "auto") {  // else the save may lie elsewhere, and this run has made none
    path_ = loaded.path;
    saved_ = report_.updates();
  }
  report_.note(join("  resumed from ", loaded.path, " after update ", report_.updates()));
}

void RunState::rehearse() {
  if (!saves_ || !config_.state.rehearse) return;
  const auto save = engine_.rehearse_save(directory_);
  report_.note(join("  a save takes ", memory::format_bytes(save.bytes), " and ",
                    std::round(save.seconds * 100) / 100, " s; ",
                    memory::format_bytes(save.free_bytes), " are free in ", directory_));
  const auto limit = config_.state.save_total_limit;
  constexpr auto kMany = std::numeric_limits<std::int64_t>::max() / 2;  // of a run without an end
  const auto counted = limit > 0 ? limit : config_.train.max_updates / config_.state.save_every;
  const auto saves = 1 + (config_.state.keep_best ? 1 : 0) + std::min(counted, kMany);
  if (save.bytes > save.free_bytes / saves) {
    const auto most = std::numeric_limits<std::int64_t>::max() / save.bytes;
    log::warning("the ", saves, " saves of this run take ",
                 memory::format_bytes(save.bytes * std::min(saves, most)),
                 ", more than is free; free some space or set state.save_total_limit");
  }
}

void RunState::open_window() {
  in_window_ = true;
  if (!saves_) return;
  cursor_ = loader_.cursor();
  random_.clear();
  for (const auto& piece : state::random_states(engine_.group().device())) {
    random_.push_back(piece.values);
  }
}

void RunState::give_window_back() {
  if (!std::exchange(in_window_, false)) return;
  engine_.discard_window();
  loader_.seek(cursor_);
  const auto devices = state::generators_of(engine_.group().device());
  for (std::size_t i = 0; i < random_.size(); ++i) state::set_random_state(devices[i], random_[i]);
}

// Ranks may differ in the last bits of a loss, and must not in whether they save.
void RunState::validated(double loss) {
  validates_ = false;
  if (!config_.state.keep_best) return;
  auto& group = engine_.group();
  const auto text = nlohmann::json(loss < best_).dump();
  if (group.all_gather_text(text, "whether a validation is the best").front() != "true") return;
  is_best_ = true;
  best_ = loss;
}

void RunState::save(Best best) {
  if (saved_ != report_.updates()) {
    options_ = {};
    options_.cursor = loader_.cursor();
    options_.user = {{"report", report_.text()}, {"data", data_identity()}};
    if (validates_) options_.user["owes_validation"] = "yes";
    options_.total_limit = config_.state.save_total_limit;
    options_.keep_every = config_.state.keep_every;
  } else if (best == Best::no) {
    return;
  }
  options_.best = best == Best::yes;
  if (std::isfinite(best_)) options_.user["best"] = nlohmann::json(best_).dump();
  path_ = engine_.save(directory_, options_);
  saved_ = report_.updates();
  is_best_ = false;
}

int RunState::asked_on_any_rank() {
  const int mine = interrupt_.take_save();
  auto& group = engine_.group();
  if (group.size() == 1) return mine;
  const auto asked = at::full({1}, mine != 0 ? 1.0F : 0.0F,
                              at::TensorOptions().dtype(at::kFloat).device(group.device()));
  const auto done = group.all_reduce(asked, "whether a rank shall save and end");
  done.wait();
  done.synchronize();
  if (asked.item<float>() == 0) return 0;
  return mine != 0 ? mine : SIGTERM;
}

// The window would end without this word, too, but not before the other ranks have run the rest.
void RunState::drop_if_asked() {
  auto& group = engine_.group();
  if (!saves_ || group.size() == 1) return;
  if (InterruptScope::save_is_asked()) {
    group.leave_note(asked_note_, "yes");
    throw WindowDropped();
  }
  const auto now = std::chrono::steady_clock::now();
  if (now - looked_ < kLookEvery) return;
  looked_ = now;
  if (group.note(asked_note_)) throw WindowDropped();
}

// Ranks are at the same batch of it, whatever their pace: they ask each other as often as a look
// at the store is for.
void RunState::leave_validation_if_asked() {
  auto& group = engine_.group();
  if (!saves_ || group.size() == 1 || --batches_left_ > 0) return;
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> since = now - looked_;
  const nlohmann::json mine{InterruptScope::save_is_asked(), since.count()};
  bool asked = false;
  double slowest = 1e-9;
  for (const auto& text : group.all_gather_text(mine.dump(), "end of the validation")) {
    const auto of_rank = nlohmann::json::parse(text);
    asked = asked || of_rank[0].get<bool>();
    slowest = std::max(slowest, of_rank[1].get<double>());
  }
  if (asked) throw WindowDropped();
  const auto fit = static_cast<double>(batches_) * 5 * std::chrono::duration<double>(kLookEvery) /
                   std::chrono::duration<double>(slowest);
  batches_ = batches_left_ =
      std::clamp(static_cast<std::int64_t>(fit), std::int64_t{1}, 2 * batches_);
  looked_ = now;
}

void RunState::begin_validation() {
  validates_ = true;
  batches_ = 1;
  batches_left_ = 0;
  looked_ = std::chrono::steady_clock::now();
}

void RunState::save_dropped() {
  give_window_back();
  const int mine = interrupt_.take_save();
  save_and_end(mine != 0 ? mine : SIGTERM);
}

void RunState::save_and_end(int signal) {
  save(Best::no);
  engine_.finish_save();
  report_.note(join("  saved after update ", report_.updates(), " in ", directory_));
  engine_.group().barrier("the end of the run");  // its store goes with rank 0
  throw SavedAtSignal{signal};
}

void RunState::save_if_due() {
  if (!saves_) return;
  if (is_best_) save(Best::yes);
  if (report_.updates() % config_.state.save_every == 0) save(Best::no);
  if (const int signal = asked_on_any_rank()) save_and_end(signal);
}

void RunState::save_at_end() {
  if (saves_) save(Best::no);
  engine_.finish_save();
}

// The save is there; what the validation has found is added to it.
void RunState::save_if_best() {
  if (!is_best_) return;
  if (path_.empty()) {
    saved_ = -1;
    save(Best::yes);
    return engine_.finish_save();
  }
  auto& group = engine_.group();
  std::string problem;
  if (group.rank() == 0) {
    try {
      state::mark_best(path_, {{"best", nlohmann::json(best_).dump()}},
                       config_.state.save_total_limit, config_.state.keep_every);
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  const auto of_first = group.all_gather_text(problem, "the best save").front();
  if (!of_first.empty()) throw Error(of_first);
}

void RunState::save_at_signal(int signal) {
  if (!saves_ || engine_.group().size() > 1 || !InterruptScope::asks_for_save(signal)) return;
  interrupt_.take_save();  // or another one that has come since
  give_window_back();
  save_and_end(signal);
}

}  // namespace poise::cli
