// Stop 2's other half: which ranks run a micro-batch, and which follow them.
#include <algorithm>
#include <utility>

#include "engine/impl.h"
#include "poise/log.h"
#include "poise/out_of_memory.h"
#include "poise/window_dropped.h"

namespace poise {

using engine::Followed;

std::vector<double> Engine::Impl::micro_batch_counts(std::size_t mine) {
  const std::vector<double> row{static_cast<double>(mine)};
  if (!shards.reduces_every_micro_batch() && !units) return row;
  return engine::gather_rows(*group, row, "number of micro-batches");
}

void Engine::Impl::run_micro_batch(std::size_t index, std::size_t count,
                                   const std::vector<double>& counts, const LossFn& loss) {
  if (followed != Followed::not_at_all) return;  // to the end of the window
  const auto runs = [index](double of_rank) { return of_rank > static_cast<double>(index); };
  const auto leader = std::find_if(counts.begin(), counts.end(), runs) - counts.begin();
  const bool all_run = std::all_of(counts.begin(), counts.end(), runs);
  if (units && !all_run && leader == group->rank()) following.publish();
  // What is joined once per window is joined in the last micro-batch of any rank at stage 3, whose
  // ranks move together, and in each rank's own last one otherwise.
  const auto most =
      units ? *std::max_element(counts.begin(), counts.end()) : static_cast<double>(count);
  const auto position = static_cast<double>(index + 1) == most || (!units && index >= count)
                            ? zero::MicroBatch::last
                            : zero::MicroBatch::inner;
  if (index < count) {
    run_or_lose([&] { backward(forward([&] { return loss_in_window(index, loss); }), position); });
    if (lost) follow();
  } else if (units) {
    following.follow();
    follow();
  } else {
    agree_without_micro_batch();
    gradients.follow_micro_batch(position);
  }
  if (!lost && followed == Followed::not_at_all) measure_small(position);
}

// What the user's loss may not do meanwhile: the sums of its window would be those of another.
Loss Engine::Impl::loss_in_window(std::size_t index, const LossFn& loss) {
  const auto before = micro_batches;
  auto made = loss(index);
  if (state == engine::WindowState::open && micro_batches == before) return made;
  fail("engine", "the loss of micro-batch ", index + 1,
       " of step(window) ended that window, or added to it (discard_window(), begin_update(), "
       "backward() or step() in it); throw an exception to drop the window, or use the three-call "
       "form");
}

// A rank without a micro-batch in the run's first window.
void Engine::Impl::agree_without_micro_batch() {
  if (loss_weights.knows_q()) return;
  following.take(zero::Following::Operation::agree);
  loss_weights.agree_without_micro_batch();
}

// [Note: out of memory on some ranks] It must not end the group: with smaller micro-batches the
// window may fit. So this rank gives up what it holds of the micro-batch and follows the others to
// the end of the window (zero/following.h), where all learn of it and drop the window. A rank whose
// loss throws WindowDropped does the same; where all do, the window ends where the first of them
// has come to.
void Engine::Impl::run_or_lose(const std::function<void()>& micro_batch) {
  engine::Lost given_up;
  try {
    micro_batch();
    return;
  } catch (const WindowDropped&) {
    if (group->size() == 1) throw;
    given_up = {true, "its loss dropped the window"};
  } catch (...) {
    if (group->size() == 1 || !is_out_of_memory(std::current_exception())) throw;
    given_up = {false, engine::message_of(std::current_exception())};
  }
  lose(given_up);
}

void Engine::Impl::lose(const engine::Lost& given_up) {
  // Not the exception itself: one of Python's holds the frames, and their tensors, that it left.
  lost = given_up;
  // The others hear of it first: the gathers in flight end when all have submitted theirs.
  following.lose(given_up.why);
  if (!given_up.dropped) {
    log::info("rank ", group->rank(), " ran out of memory in this window: ", given_up.why);
  }
  engine::drain_autograd_queue();
  gradients.drop_unjoined();
  if (units) units->discard();
}

// The rest of the window as the ranks that run it say.
void Engine::Impl::follow() {
  using Operation = zero::Following::Operation;
  followed = Followed::to_nobody;
  if (units) units->begin_recording();
  while (const auto step = following.next()) {
    const auto index = static_cast<int>(step->index);
    switch (step->operation) {
      case Operation::begin_micro_batch:
        gradients.begin_following(index != 0);
        break;
      case Operation::agree:
        agree_without_micro_batch();
        break;
      case Operation::gather:
        units->follow_gather(index);
        break;
      case Operation::join:
        gradients.join_flat(index);
        break;
      case Operation::end_micro_batch:
        gradients.end_following();
        if (units) {
          units->end_micro_batch();
          units->begin_recording();
        }
        break;
      case Operation::end_window:
        gradients.end_following();
        followed = Followed::to_end;
        return;
    }
  }
  gradients.end_following();
}

// A rank that lost the window takes part in what is left of it, its sums included.
void Engine::Impl::follow_to_end() {
  follow();
  sum_up();
}

// Outside of what run_or_lose() runs: up to the sums, by which all ranks hear of it.
void Engine::Impl::follow_lost(const engine::Lost& given_up) {
  guarded([&] {
    if (state == engine::WindowState::closed) open_window({});
    lose(given_up);
    follow_to_end();
  });
}

void Engine::Impl::lose_window(const std::string& why) {
  follow_lost({false, why});
  try {
    drop_lost_window();
  } catch (const c10::OutOfMemoryError&) {
    // The caller has the error that it all began with.
  }
}

void Engine::Impl::refuse_after_sums(const char* call) const {
  if (state != engine::WindowState::summed) return;
  fail(
      "engine", call,
      " came after begin_update(), when all ranks have their sums; call discard_window() on all of "
      "them");
}

// A window that some rank has lost is dropped on all of them; the exception it ends with.
void Engine::Impl::drop_lost_window() {
  ++lost_windows;
  discard_window();
  loss_weights.forget_window();
  const auto told = std::exchange(sums, {});
  const auto mine = std::exchange(lost, std::nullopt);
  if (told.dropped) throw WindowDropped();
  if (mine && !mine->dropped) throw_out_of_memory(mine->why);
  throw_out_of_memory(
      join("[engine] rank ", told.lost_rank,
           " ran out of memory; the window is dropped on all ranks: ", told.lost_why));
}

}  // namespace poise
