// One update, stop by stop (docs/dataflow.md has the table). Nothing else knows the order.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <thread>

#include "engine/impl.h"
#include "poise/log.h"

namespace poise {

using engine::Stopwatch;
using engine::WindowState;
using memory::Account;
using memory::AccountScope;

// Stop 2: the window opens; edits of parameters since the last update reach their masters.
void Engine::Impl::open_window(const std::vector<double>& counts) {
  POISE_CHECK(state == WindowState::closed);
  store.notice_edits();
  gradients.start_window();
  loss_weights.begin_window(counts);
  ledger.reset_peak();
  times = {};
  micro_batches = 0;
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
  return loss();
}

// Stops 6 and 7: weighted, scaled, backward; hooks take the gradients as they come.
void Engine::Impl::backward(const Loss& loss, bool last) {
  RECORD_USER_SCOPE("poise::backward");
  Stopwatch watch(times.backward_seconds);
  AccountScope scope(ledger, Account::activations);
  at::AutoGradMode grad_on(true);
  const auto weighted = loss_weights.weigh(loss, scaler.scale());
  ++micro_batches;
  if (!weighted.defined()) return;  // counted nothing
  if (weighted.device() != device) {
    fail("engine", "the loss is on ", weighted.device(), ", the parameters on ", device,
         "; move the batch to the model's device");
  }
  zero::Gradients::Taking taking(gradients, last);
  torch::autograd::backward({weighted}, {});
}

double Engine::Impl::unscale_factor(double tokens) const {
  return loss_weights.mean_factor(tokens) / scaler.scale();
}

// As torch's clip_grad_norm_, so that both clip alike.
double Engine::Impl::clip_factor(double grad_norm) const {
  const double limit = config.optimizer.max_grad_norm;
  if (limit <= 0) return 1.0;
  return std::min(1.0, limit / (grad_norm + 1e-6));
}

// Stop 8: N, status and norm; the window's one host sync.
void Engine::Impl::sum_up() {
  RECORD_USER_SCOPE("poise::sum_up");
  AccountScope scope(ledger, Account::other);
  at::NoGradGuard no_grad;
  sums = {};
  sums.totals = loss_weights.totals();
  gradients.finish_window();
  const auto squared = gradients.squared_norms().cpu();
  const auto* norms = squared.const_data_ptr<double>();
  double total = 0;  // in entry order: the same bits for any number of threads
  for (std::size_t i = 0; i < table.entries().size(); ++i) {
    total += norms[i];
    if (!std::isfinite(norms[i]) && sums.first_bad_parameter.empty()) {
      sums.first_bad_parameter = table.entries()[i].name;
    }
  }
  if (sums.totals.tokens == 0) {
    sums.status = Status::empty;
    return;
  }
  sums.grad_norm = std::sqrt(total) * unscale_factor(sums.totals.tokens);
  if (!std::isfinite(sums.totals.loss)) {
    sums.status = Status::nonfinite_loss;
  } else if (!std::isfinite(total)) {
    sums.status = scales_loss() ? Status::overflow : Status::nonfinite_gradient;
  }
}

// Gradients that the user wrote after begin_update() go back into the accumulators, in their scale.
void Engine::Impl::take_edited_gradients() {
  at::NoGradGuard no_grad;
  bool edited = false;
  for (auto& [entry, pair] : lent) {
    if (at::equal(pair.gradient, pair.original)) continue;
    auto target = store.view_of(
        entry, store.flat(table.entries()[static_cast<std::size_t>(entry)].flat).accumulator);
    target.copy_(pair.gradient.to(at::kDouble).div(unscale_factor(sums.totals.tokens)));
    gradients.invalidate_norm(entry);
    edited = true;
  }
  lent.clear();
  if (edited) sum_up();
}

// Stop 10: new masters, moments and low-precision copies.
void Engine::Impl::apply(double factor) {
  RECORD_USER_SCOPE("poise::optimizer");
  AccountScope scope(ledger, Account::other);
  at::NoGradGuard no_grad;
  const auto groups = group_settings();
  for (auto& span : optimizer_spans.spans) {
    optimizer->apply(span, groups, updates + 1, factor, optimizer->stats(span, groups, factor));
  }
}

StepResult Engine::Impl::close_window() {
  RECORD_USER_SCOPE("poise::update");
  StepResult result;
  {
    Stopwatch watch(times.update_seconds);
    if (state == WindowState::open) sum_up();  // stop 8
    if (!lent.empty()) take_edited_gradients();
    result.status = sums.status;
    result.loss = sums.totals.loss;
    result.tokens = sums.totals.tokens;
    result.grad_norm = sums.grad_norm;
    result.first_bad_parameter = sums.first_bad_parameter;
    result.lr = learning_rate();
    result.loss_scale = scaler.scale();
    if (sums.status == Status::applied) {
      const double clip = clip_factor(sums.grad_norm);  // stop 9
      result.clipped_norm = sums.grad_norm * clip;
      apply(unscale_factor(sums.totals.tokens) * clip);  // stop 10
      ++updates;
    } else {
      ++skipped;
    }
    if (sums.status == Status::applied || sums.status == Status::overflow) {
      if (scaler.update(sums.status == Status::overflow)) {  // stop 11
        log::warning("gradients overflow at the smallest loss scale ", scaler.scale(),
                     "; raise precision.min_loss_scale's headroom or train in bf16");
      }
    }
  }
  result.forward_seconds = times.forward_seconds;  // stop 12
  result.backward_seconds = times.backward_seconds;
  result.update_seconds = times.update_seconds;
  result.total_seconds = std::chrono::duration<double>(engine::Clock::now() - window_start).count();
  result.micro_batches = micro_batches;
  result.updates = updates;
  result.skipped = skipped;
  const auto books = ledger.snapshot();
  result.peak_bytes = books.peak_bytes;
  result.accounts = books.at_peak;
  state = WindowState::closed;
  micro_batches = 0;
  return result;
}

void Engine::Impl::discard_window() {
  if (state == WindowState::closed) return;
  state = WindowState::closed;
  micro_batches = 0;
  lent.clear();
  gradients.start_window();
  engine::drain_autograd_queue();
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
