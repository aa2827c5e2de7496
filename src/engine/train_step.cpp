// One update, stop by stop (docs/dataflow.md has the table). Nothing else knows the order.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "engine/impl.h"
#include "engine/whole_sums.h"
#include "poise/log.h"
#include "poise/out_of_memory.h"

namespace poise {

using engine::Stopwatch;
using engine::WindowState;
using memory::Account;
using memory::AccountScope;

// Stop 2: the window opens; edits of parameters since the last update reach their masters.
void Engine::Impl::open_window(const std::vector<double>& counts) {
  RECORD_USER_SCOPE("poise::open_window");
  POISE_CHECK(state == WindowState::closed);
  refuse_half_an_update();
  saver.check();
  if (half_loaded) {
    fail("engine", "the last load failed midway; load a whole save before training goes on");
  }
  if (units && gathered_scopes > 0) {
    fail("engine",
         "a window was opened inside gathered(), whose whole parameters no update would reach; "
         "close it first");
  }
  freezing.open_window(*optimizer);
  store.forget_given();
  notice_edits();
  gradients.start_window();
  loss_weights.begin_window(counts);
  following.begin_window();
  followed = engine::Followed::not_at_all;
  lost.reset();
  ledger.reset_peak();
  times = {};
  micro_batches = 0;
  small.reset();
  clip_at.reset();
  window_start = engine::Clock::now();
  state = WindowState::open;
}

// Stops 4 and 5: the user's forward under autocast.
Loss Engine::Impl::forward(const std::function<Loss()>& loss) {
  RECORD_USER_SCOPE("poise::forward");
  Stopwatch watch(times.forward_seconds);
  AccountScope scope(ledger, Account::activations);
  at::AutoGradMode grad_on(true);
  precision::AutocastGuard autocast(device.type(), precision::autocast_dtype(config.precision));
  if (units) {  // stop 3
    units->begin_recording();
    units->hold_rest();
  }
  const auto saving = saving_scope();
  return loss();
}

// Stop 6: the weighted, scaled scalar; undefined where it counted nothing.
at::Tensor Engine::Impl::weigh(const Loss& loss) {
  RECORD_USER_SCOPE("poise::weigh_loss");
  return loss_weights.weigh(
      loss, scaler.scale(),
      units ? engine::LossWeights::Empty::kept : engine::LossWeights::Empty::left_out);
}

// Stops 6 and 7: weighted, scaled, backward; hooks take the gradients as they come.
void Engine::Impl::backward(const Loss& loss, zero::MicroBatch position) {
  RECORD_USER_SCOPE("poise::backward");
  Stopwatch watch(times.backward_seconds);
  AccountScope scope(ledger, Account::activations);
  memory::AutogradScope of_autograd(ledger, Account::activations);
  at::AutoGradMode grad_on(true);
  if (!loss_weights.knows_q()) following.take(zero::Following::Operation::agree);
  freezing.check_unchanged(micro_batches);
  auto weighted = weigh(loss);
  ++micro_batches;
  auto counted = zero::Count::yes;
  if (!weighted.defined()) {  // counted nothing
    if (!units) {
      gradients.follow_micro_batch(position);
      measure_small(position);
      return;
    }
    // With sharded parameters the other ranks need this one's share of every unit's backward.
    counted = zero::Count::no;
    weighted = engine::everything(loss);
  }
  if (weighted.device() != device) {
    fail("engine", "the loss is on ", weighted.device(), ", the parameters on ", device,
         "; move the batch to the model's device");
  }
  {
    zero::Gradients::Taking taking(gradients, position, counted);
    if (units) units->hold_rest();
    torch::autograd::backward({weighted}, {});
    if (units) units->let_rest_go();
  }
  gradients.end_micro_batch();
  if (units) units->end_micro_batch();
  measure_small(position);
}

double Engine::Impl::unscale_factor(double tokens) const {
  return loss_weights.mean_factor(tokens) / scaler.scale();
}

// As torch's clip_grad_norm_, so that both clip alike.
double Engine::Impl::clip_factor(double grad_norm) const {
  const double limit = clip_at.value_or(config.optimizer.max_grad_norm);
  if (limit <= 0) return 1.0;
  return std::min(1.0, limit / (grad_norm + 1e-6));
}

// This rank's share of stop 8: sums of its losses and counts, the squares of its shard's gradients
// in entry order, where they are not finite, and what it has frozen.
struct Share {
  enum Place { squares, bad_entry, micro_batches, lost, frozen, first_sum };
  static constexpr double kNone = -1;
  static constexpr double kOutOfMemory = 1, kDropped = 2;  // at `lost`
};

// Stop 8: N, status and norm, the same on all ranks; where the host waits for the device.
void Engine::Impl::sum_up() {
  RECORD_USER_SCOPE("poise::sum_up");
  AccountScope scope(ledger, Account::other);
  at::NoGradGuard no_grad;
  sums = {};
  if (state == WindowState::open && !lost) freezing.check_unchanged(micro_batches);
  if (units) units->end_window();
  if (followed != engine::Followed::to_nobody) {
    agree_without_micro_batch();
    gradients.join_window();
    following.take(zero::Following::Operation::end_window);
    gradients.finish_window();
  }
  std::vector<double> row{0, Share::kNone, static_cast<double>(micro_batches), 0,
                          freezing.fingerprint()};
  if (lost) row[Share::lost] = lost->dropped ? Share::kDropped : Share::kOutOfMemory;
  const auto asked = engine::Clock::now();
  const auto squared = gradients.squared_norms().cpu();
  if (!device.is_cpu()) {  // only now it has done what forward and backward have queued
    const double waited = std::chrono::duration<double>(engine::Clock::now() - asked).count();
    times.backward_seconds += waited;
    times.update_seconds -= waited;
  }
  const auto* norms = squared.const_data_ptr<double>();
  const bool first_replica = ranks.replica->rank() == 0;  // the others have the same sums
  for (std::size_t i = 0; i < table.entries().size() && first_replica; ++i) {
    if (freezing.is_frozen(i)) continue;  // of a forward that nothing of the window came from
    row[Share::squares] += norms[i];
    if (!std::isfinite(norms[i]) && row[Share::bad_entry] == Share::kNone) {
      row[Share::bad_entry] = static_cast<double>(i);
    }
  }
  const auto measured = small.value_or(engine::NoiseScale::Small());
  if (config.engine.noise_scale) row.insert(row.end(), {measured.squares, measured.tokens});
  for (const double sum : loss_weights.sums()) row.push_back(sum);

  const auto rows = engine::gather_rows(*group, row, "sums of the window",
                                        [&](const Event& done) { following.synchronize(done); });
  for (const auto& one : {ranks.shard, ranks.replica}) one->check();
  std::vector<double> joined(row.size(), 0.0);  // in rank order: the same bits on every rank
  double bad_entry = Share::kNone;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    joined[i % row.size()] += rows[i];
    if (i % row.size() == Share::bad_entry && rows[i] != Share::kNone &&
        (bad_entry == Share::kNone || rows[i] < bad_entry)) {
      bad_entry = rows[i];
    }
  }
  if (joined[Share::lost] > 0) {
    note_losses(rows, row.size());
    return;
  }
  following.end_window();
  for (auto at = std::size_t{Share::frozen}; at < rows.size(); at += row.size()) {
    if (rows[at] == row[Share::frozen]) continue;
    fail("engine", "rank ", at / row.size(), " has frozen other parameters than rank ",
         group->rank(), "; set requires_grad to the same on all ranks");
  }
  gather_gradients();
  if (joined[Share::micro_batches] == 0) {
    fail("engine", "the window has no micro-batches on any rank; pass at least one");
  }
  if (bad_entry != Share::kNone) {
    sums.first_bad_parameter = table.entries()[static_cast<std::size_t>(bad_entry)].name;
  }
  const int first_sum = Share::first_sum + (config.engine.noise_scale ? 2 : 0);
  sums.totals = loss_weights.totals({joined.begin() + first_sum, joined.end()});
  if (sums.totals.tokens == 0) {
    sums.status = Status::empty;
    return;
  }
  const double total = joined[Share::squares];
  sums.grad_norm = std::sqrt(total) * unscale_factor(sums.totals.tokens);
  if (!std::isfinite(sums.totals.loss)) {
    sums.status = Status::nonfinite_loss;
  } else if (!std::isfinite(total)) {
    sums.status = scales_loss() ? Status::overflow : Status::nonfinite_gradient;
  } else if (config.engine.noise_scale) {
    measure_noise(rows, row.size());
  }
}

// After a window's first micro-batch, unless it is the only one.
void Engine::Impl::measure_small(zero::MicroBatch position) {
  if (!config.engine.noise_scale || small || position == zero::MicroBatch::last) return;
  // Each replica has joined a gradient of its own, of which the ranks hold shards.
  if (ranks.replica->size() > 1 && shards.reduces_every_micro_batch()) return;
  AccountScope scope(ledger, Account::other);
  small = {gradients.squares_so_far(), loss_weights.sums()[1]};
}

void Engine::Impl::measure_noise(const std::vector<double>& rows, std::size_t columns) {
  // A rank without a micro-batch followed the others to the end, past the first one.
  for (std::size_t at = Share::micro_batches; units && at < rows.size(); at += columns) {
    if (rows[at] == 0) return small.reset();
  }
  std::vector<engine::NoiseScale::Small> all;
  double tokens = 0;
  const bool joined = shards.reduces_every_micro_batch();
  for (auto at = std::size_t{Share::first_sum}; at < rows.size(); at += columns) {
    all.push_back({rows[at], rows[at + 1]});
    tokens += rows[at + 1];
  }
  for (auto& one : all) {  // squares of sums become those of means
    const double of = joined ? tokens : one.tokens;
    const double factor = of > 0 ? unscale_factor(of) : 0;
    one.squares *= factor * factor;
  }
  small.reset();  // gradients that the user edits are no measurement
  noise.add(all, joined, sums.grad_norm * sums.grad_norm, sums.totals.tokens);
}

// Which rank ran out of memory, and what it said; or that some dropped the window.
void Engine::Impl::note_losses(const std::vector<double>& rows, std::size_t columns) {
  for (const double how : {Share::kOutOfMemory, Share::kDropped}) {
    for (int rank = 0; rank < group->size() && sums.lost_rank < 0; ++rank) {
      if (rows[static_cast<std::size_t>(rank) * columns + Share::lost] != how) continue;
      sums.lost_rank = rank;
      sums.dropped = how == Share::kDropped;
      sums.lost_why = following.loss_of(rank);
    }
  }
  following.end_window();
}

// Stage 0 over several ranks: the sums, joined by shards, become whole for everybody's optimizer.
void Engine::Impl::gather_gradients() {
  if (shards.size() == 1 || shards.splits_optimizer()) return;
  for (const auto& state : optimizer_states.states) gathers.gradient(state.flat);
  gathers.wait();
}

// Gradients that the user wrote after begin_update() go back into the accumulators, in their scale.
// Over several ranks all ranks have the same ones lent, and sum up together.
void Engine::Impl::take_edited_gradients() {
  if (lent.empty()) return;
  at::NoGradGuard no_grad;
  AccountScope scope(ledger, Account::gradients);
  small.reset();  // what is summed up anew is no measurement beside it
  bool edited = group->size() > 1;
  for (auto& [entry, pair] : lent) {
    if (at::equal(pair.gradient, pair.original)) continue;
    store.write_gradient(entry,
                         pair.gradient.to(at::kDouble).div(unscale_factor(sums.totals.tokens)));
    gradients.make_norm(entry);
    pair.original = pair.gradient.clone();  // it stays lent, and may be written once more
    edited = true;
  }
  if (edited) sum_up();
}

// Stop 10: new masters, moments and low-precision copies; each rank's shard reaches the others
// while the next one is updated.
void Engine::Impl::apply(double factor) {
  RECORD_USER_SCOPE("poise::optimizer");
  AccountScope scope(ledger, Account::other);
  at::NoGradGuard no_grad;
  const auto groups = group_settings();
  saver.finish_reading();  // masters and moments, from here on
  freezing.mark(optimizer_states.states);
  const auto update = [&](optim::Span& span) {
    optim::apply_to_awake(*optimizer, span, groups, updates + 1, factor);
  };
  engine::sum_over_parameters(optimizer_states.states, *optimizer, groups, updates + 1, factor,
                              shards, *ranks.shard);
  try {
    state_update.run(update, [&](int flat) {
      if (shards.splits_optimizer() && !shards.splits_parameters(flat)) {
        gathers.values(flat);
      }
    });
    gathers.wait();
  } catch (...) {
    half_an_update = engine::message_of(std::current_exception());
    gathers.drop();
    throw;
  }
}

// All ranks have agreed on the update by now: none can follow the others past a part that it has no
// memory for.
void Engine::Impl::apply_or_say_why_not(double factor) {
  try {
    apply(factor);
  } catch (...) {
    const auto reason = std::current_exception();
    if (!is_out_of_memory(reason)) throw;
    throw_out_of_memory(join(
        "[engine] rank ", group->rank(), " ran out of memory in the optimizer's part of update ",
        updates + 1, ": ", engine::message_of(reason),
        "; set offload.optimizer or a higher zero.stage, or leave more room with a smaller "
        "batch.micro_batch_size, and go on from a saved state"));
  }
}

// What an update changed before it failed cannot be taken back.
void Engine::Impl::refuse_half_an_update() const {
  if (half_an_update.empty()) return;
  fail("engine", "update ", updates + 1, " ended in its middle, so that states are partly of it (",
       half_an_update, "); go on with a new engine, from the start or a saved state");
}

namespace {

// A NaN's sign says nothing, but would be printed.
double without_sign_of_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

}  // namespace

// Stop 9: unscale, the mean and clipping in one number.
double Engine::Impl::factor_of(double clip) const {
  RECORD_USER_SCOPE("poise::factor");
  return unscale_factor(sums.totals.tokens) * clip;
}

// Stop 11; the learning rate follows from the number of applied updates.
void Engine::Impl::next_loss_scale() {
  RECORD_USER_SCOPE("poise::loss_scale");
  if (sums.status != Status::applied && sums.status != Status::overflow) return;
  if (scaler.update(sums.status == Status::overflow)) {
    log::warning("gradients overflow at the smallest loss scale ", scaler.scale(),
                 "; raise precision.min_loss_scale's headroom or train in bf16");
  }
}

// Of a copy of the model, for example: its losses have gradients, but not for ours.
void Engine::Impl::warn_of_no_gradient() {
  const bool none = sums.status == Status::applied && sums.grad_norm == 0;
  if (!none || std::exchange(no_gradient_noted, true) || group->rank() > 0) return;
  log::warning("the gradient of update ", updates + 1,
               " is 0 for every parameter; is the loss computed with the engine's model, and not "
               "with a copy of it? (said once)");
}

StepResult Engine::Impl::close_window() {
  RECORD_USER_SCOPE("poise::update");
  StepResult result;
  {
    Stopwatch watch(times.update_seconds);
    if (state == WindowState::open) sum_up();  // stop 8
    if (sums.lost_rank >= 0) return result;    // nothing is applied
    take_edited_gradients();
    lent.clear();
    result.status = sums.status;
    result.loss = without_sign_of_nan(sums.totals.loss);
    result.tokens = sums.totals.tokens;
    result.noise_scale = noise.value();
    result.grad_norm = without_sign_of_nan(sums.grad_norm);
    result.first_bad_parameter = sums.first_bad_parameter;
    result.lr = learning_rate();
    result.loss_scale = scaler.scale();
    warn_of_no_gradient();
    if (sums.status == Status::applied) {
      const double clip = clip_factor(sums.grad_norm);
      result.clipped_norm = sums.grad_norm * clip;
      apply_or_say_why_not(factor_of(clip));  // stops 9 and 10
      ++updates;
      freezing.count_update();
    } else {
      ++skipped;
    }
    next_loss_scale();  // stop 11
  }
  {
    RECORD_USER_SCOPE("poise::result");  // stop 12
    result.forward_seconds = times.forward_seconds;
    result.backward_seconds = times.backward_seconds;
    result.update_seconds = times.update_seconds;
    result.total_seconds =
        std::chrono::duration<double>(engine::Clock::now() - window_start).count();
    result.micro_batches = micro_batches;
    result.updates = updates;
    result.skipped = skipped;
    result.host_bytes = offloading.host_bytes();
    result.file_bytes = offloading.file_bytes();
    const auto books = ledger.snapshot();
    result.peak_bytes = books.peak_bytes;
    result.accounts = books.at_peak;
  }
  loss_weights.end_window();
  state = WindowState::closed;
  micro_batches = 0;
  return result;
}

void Engine::Impl::discard_window() {
  if (state == WindowState::closed) return;
  if (group->size() == 1) loss_weights.forget_window();  // ranks do so together: drop_lost_window
  loss_weights.end_window();
  state = WindowState::closed;
  micro_batches = 0;
  lent.clear();
  following.drop_window();
  engine::drain_autograd_queue();
  gradients.start_window();
  if (units) units->discard();
}

// What fails on one rank is fatal to all: they would wait for it.
void Engine::Impl::give_up_window(const std::exception_ptr& reason) noexcept {
  engine::end_group(ranks, reason);
  discard_window();
}

// [Note: stale tasks] A backward that throws leaves its unrun tasks, and the gradients in them, in
// this thread's autograd queue until something pops them. A node made in a new thread has the
// lowest sequence number, so its backward runs last and pops all of them.
void engine::drain_autograd_queue() {
  at::Tensor output;
  std::thread([&] {
    at::AutoGradMode grad_on(true);
    output = at::ones({1}).requires_grad_().mul(1);
  }).join();
  torch::autograd::backward({output}, {});
}

}  // namespace poise
