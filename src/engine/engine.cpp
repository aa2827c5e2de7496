// The door of the room: checks the order of calls and hands them to train_step.
#include "poise/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/nearest_name.h"
#include "engine/impl.h"
#include "poise/log.h"
#include "poise/window_dropped.h"

namespace poise {

using engine::WindowState;

Engine::Engine(const ModelView& model, const Config& config, std::shared_ptr<comm::Group> group,
               const Materialize& materialize)
    : Engine(model, config, comm::Ranks{std::move(group), {}, {}}, materialize) {}
Engine::Engine(const ModelView& model, const Config& config, comm::Ranks ranks,
               const Materialize& materialize) {
  RECORD_USER_SCOPE("poise::build");
  const auto told = ranks;
  try {
    impl_ = std::make_unique<Impl>(model, config, std::move(ranks), materialize);
  } catch (...) {
    engine::end_group(told, std::current_exception());
    throw;
  }
}
Engine::~Engine() = default;

namespace {

void stop_on_nonfinite(const Config& config, const StepResult& result) {
  if (config.engine.on_nonfinite != config::NonFinite::stop) return;
  if (result.status == Status::nonfinite_loss) {
    fail("engine", "the loss is ", result.loss, " at update ", result.updates + 1,
         "; nothing was changed. Lower the learning rate, check the data, or set "
         "engine.on_nonfinite to skip");
  }
  if (result.status == Status::nonfinite_gradient) {
    fail("engine", "the gradient of parameter '", result.first_bad_parameter,
         "' is not finite at update ", result.updates + 1,
         "; nothing was changed. Lower the learning rate, or set engine.on_nonfinite to skip");
  }
}

}  // namespace

StepResult Engine::step(std::size_t count, const LossFn& loss, const std::vector<double>& counts) {
  if (impl_->state != WindowState::closed) {
    fail("engine", "step(window) was called with ", impl_->micro_batches,
         " micro-batches of an open window; close it with step(Last::yes) or discard_window() "
         "first");
  }
  if (count == 0 && impl_->group->size() == 1) {
    fail("engine", "the window has no micro-batches; pass at least one");
  }
  const auto result = impl_->guarded([&] {
    impl_->open_window(counts);
    const auto of_ranks = impl_->micro_batch_counts(count);
    const auto most = static_cast<std::size_t>(*std::max_element(of_ranks.begin(), of_ranks.end()));
    for (std::size_t i = 0; i < most; ++i) impl_->run_micro_batch(i, count, of_ranks, loss);
    return impl_->close_window();
  });
  if (impl_->sums.lost_rank >= 0) impl_->drop_lost_window();
  stop_on_nonfinite(impl_->config, result);
  return result;
}

struct Engine::ForwardScope::Impl {
  explicit Impl(Engine::Impl& engine)
      : owner(engine),
        watch(engine.times.forward_seconds),
        account(engine.ledger, memory::Account::activations),
        autocast(engine.device.type(), precision::autocast_dtype(engine.config.precision)) {
    if (at::GradMode::is_enabled()) {
      if (range.isActive()) range.before("poise::forward");
      saving = engine.saving_scope();
    }
    if (!engine.units) return;
    if (at::GradMode::is_enabled()) {
      engine.units->begin_recording();
    } else if (!engine.units->holds_rest()) {
      evaluated = engine.units.get();
    }
    engine.guarded([&] { engine.units->hold_rest(); });
  }
  ~Impl() {
    if (std::uncaught_exceptions() > exceptions) fail("a forward threw an exception");
    if (evaluated) evaluated->let_rest_go();
  }
  // The other ranks wait for this one's gathers.
  bool others_wait() const {
    return owner.units && owner.gathered_scopes == 0 && owner.group->size() > 1;
  }
  void fail(const std::string& why) noexcept {
    if (owner.lost_windows != lost_windows) return;  // the others have gone on
    if (others_wait()) owner.give_up_window(std::make_exception_ptr(Error(why)));
  }
  void lose(const std::string& why) {
    const bool of_window = at::GradMode::is_enabled() && owner.state == WindowState::open;
    if (!of_window) return fail(why);  // an evaluation
    if (others_wait()) owner.lose_window(why);
  }
  Engine::Impl& owner;
  at::RecordFunction range{at::RecordScope::USER_SCOPE};
  const int exceptions = std::uncaught_exceptions();
  const std::int64_t lost_windows = owner.lost_windows;
  zero::Units* evaluated = nullptr;
  engine::Stopwatch watch;
  memory::AccountScope account;
  precision::AutocastGuard autocast;
  std::shared_ptr<void> saving;
};
Engine::ForwardScope::ForwardScope(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::ForwardScope::ForwardScope(ForwardScope&&) noexcept = default;
Engine::ForwardScope::~ForwardScope() = default;
void Engine::ForwardScope::fail(const std::string& why) noexcept {
  if (impl_) impl_->fail(why);
}
void Engine::ForwardScope::lose(const std::string& why) {
  if (impl_) impl_->lose(why);
}

// A forward without gradients is an evaluation: it belongs to no window.
Engine::ForwardScope Engine::forward_scope() {
  if (!at::GradMode::is_enabled())
    return ForwardScope(std::make_unique<ForwardScope::Impl>(*impl_));
  if (impl_->state == WindowState::summed) {
    fail("engine", "a forward came after begin_update(); call step() first");
  }
  if (impl_->state == WindowState::closed) {
    impl_->open_window({});
  } else if (impl_->micro_batches == 0) {  // opened by a forward that was none of the training's
    impl_->freezing.open_window(*impl_->optimizer);
  }
  return ForwardScope(std::make_unique<ForwardScope::Impl>(*impl_));
}

void Engine::begin_window(const std::vector<double>& counts) {
  if (impl_->state != WindowState::closed) {
    fail("engine", "begin_window() was called in an open window of ", impl_->micro_batches,
         " micro-batches; call it before the window's first forward");
  }
  impl_->open_window(counts);
}

void Engine::backward(const Loss& loss) {
  if (impl_->state == WindowState::summed) {
    fail("engine", "backward() came after begin_update(); call step() first");
  }
  if (is_boundary()) {
    fail("engine", "backward() came for micro-batch ", impl_->micro_batches + 1, " of a window of ",
         impl_->accumulation(), "; call step() at the boundary (is_boundary() tells)");
  }
  impl_->guarded([&] {
    if (impl_->state == WindowState::closed) impl_->open_window({});
    const bool is_last = impl_->micro_batches + 1 == impl_->accumulation();
    impl_->run_or_lose(
        [&] { impl_->backward(loss, is_last ? zero::MicroBatch::last : zero::MicroBatch::inner); });
    if (impl_->lost) impl_->follow_to_end();
  });
  if (impl_->sums.lost_rank >= 0) impl_->drop_lost_window();
}

void Engine::lose_window(const std::string& why) {
  if (impl_->group->size() == 1) return discard_window();
  impl_->refuse_after_sums("lose_window()");
  impl_->lose_window(why);
}

void Engine::drop_window() {
  if (impl_->group->size() == 1) {
    discard_window();
    throw WindowDropped();
  }
  impl_->refuse_after_sums("drop_window()");
  impl_->follow_lost({true, "it dropped the window"});
  impl_->drop_lost_window();
}

std::int64_t Engine::lost_windows() const { return impl_->lost_windows; }

bool Engine::is_boundary() const { return impl_->micro_batches >= impl_->accumulation(); }

StepResult Engine::step(Last last) {
  if (impl_->micro_batches == 0) {
    fail(
        "engine",
        "step() was called without a micro-batch in the window; call backward(loss) first (a plain "
        "loss.backward() does not reach poise)");
  }
  if (last == Last::no && !is_boundary()) {
    fail("engine", "step() was called after ", impl_->micro_batches, " of ", impl_->accumulation(),
         " micro-batches; call it at the boundary, or with Last::yes to close a shorter window");
  }
  const auto result = impl_->guarded([&] { return impl_->close_window(); });
  if (impl_->sums.lost_rank >= 0) impl_->drop_lost_window();
  stop_on_nonfinite(impl_->config, result);
  return result;
}

void Engine::discard_window() { impl_->discard_window(); }

void Engine::begin_update() {
  if (impl_->state != WindowState::open || impl_->micro_batches == 0) {
    fail("engine", "begin_update() was called without an open window; call backward(loss) first");
  }
  engine::Stopwatch watch(impl_->times.update_seconds);
  impl_->guarded([&] { impl_->sum_up(); });
  if (impl_->sums.lost_rank >= 0) impl_->drop_lost_window();
  impl_->state = WindowState::summed;
}

at::Tensor Engine::gradient(const std::string& name) {
  if (impl_->state != WindowState::summed) {
    fail("engine", "gradient('", name,
         "') was asked outside begin_update() and step(); call begin_update() first");
  }
  const int entry = impl_->table.find(name);
  const auto& place = impl_->table.entries()[static_cast<std::size_t>(entry)];
  if (!place.trainable) fail("engine", "parameter '", name, "' is frozen and has no gradient");
  const auto lent = impl_->lent.find(entry);
  if (lent != impl_->lent.end()) return lent->second.gradient;
  memory::AccountScope scope(impl_->ledger, memory::Account::gradients);
  const auto sum = impl_->guarded(
      [&] { return impl_->store.view_of(entry, impl_->store.whole_gradient(place.flat)); });
  const double tokens = impl_->sums.totals.tokens;
  auto mean =
      sum.to(impl_->device, at::kFloat).mul(tokens > 0 ? impl_->unscale_factor(tokens) : 0.0);
  impl_->lent[entry] = {mean, mean.clone()};
  return mean;
}

std::optional<checkpointing::ActivationOffload> Engine::activation_offload() const {
  return impl_->activations;
}

int Engine::Impl::unit_index(const std::string& name) const {
  const auto& units = table.units();
  const auto found = std::find(units.begin(), units.end(), name);
  if (found == units.end()) {
    fail("engine", "no unit named '", name, "'; the nearest is '", nearest_name(name, units), "'");
  }
  return static_cast<int>(found - units.begin());
}

zero::Unit Engine::unit(const std::string& name) const {
  return {impl_->units, impl_->unit_index(name)};
}

void Engine::Impl::prepare_gathering(const char* call) {
  if (state != WindowState::closed) {
    fail("engine", call, " was called in an open window of ", micro_batches,
         " micro-batches; call it between windows");
  }
  refuse_half_an_update();
  notice_edits();
}

Engine::Gathered Engine::gathered(std::optional<int> writer) {
  const int ranks = impl_->group->size();
  if (writer && (*writer < 0 || *writer >= ranks)) {
    fail("engine", "gathered() with writer ", *writer, " in a group of ", ranks,
         " ranks; ranks go from 0 to ", ranks - 1);
  }
  impl_->prepare_gathering("gathered()");
  return {*impl_, writer, {}};
}

Engine::Gathered Engine::gathered_unit(const std::string& unit) {
  impl_->prepare_gathering("gathered_unit()");
  return {*impl_, {}, impl_->unit_index(unit)};
}

Engine::Gathered::Gathered(Engine::Impl& engine, std::optional<int> writer, std::optional<int> unit)
    : engine_(&engine), writer_(writer), unit_(unit) {
  if (engine.units) {
    engine.guarded([&] { unit ? engine.units->claim(*unit) : engine.units->claim_all(); });
  }
  ++engine.gathered_scopes;
}
Engine::Gathered::Gathered(Gathered&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), writer_(other.writer_), unit_(other.unit_) {}
Engine::Gathered::~Gathered() {
  try {
    close();
  } catch (const std::exception& error) {
    log::warning("the end of gathered() failed: ", error.what());
  } catch (...) {
    log::warning("the end of gathered() was interrupted");
  }
}

void Engine::Gathered::close() {
  auto* engine = std::exchange(engine_, nullptr);
  if (!engine) return;
  --engine->gathered_scopes;
  const auto let_go = [&] {
    if (engine->units) unit_ ? engine->units->let_go(*unit_) : engine->units->release_all();
  };
  try {
    engine->guarded([&] {
      if (writer_) engine->store.forget_given();
      if (writer_) engine->saver.finish_reading();
      const auto flats = engine->table.flats().size();
      for (int flat = 0; writer_ && flat < static_cast<int>(flats); ++flat) {
        engine->store.share_values(flat, *writer_);
      }
      if (!writer_) engine->store.warn_of_lost_edits();
    });
  } catch (...) {  // what is whole goes all the same
    let_go();
    throw;
  }
  engine->guarded(let_go);
}

void Engine::unmake() {
  impl_->guarded([&] { impl_->unmake(); });
}

void Engine::refresh(const std::string& name) {
  impl_->saver.finish_reading();
  impl_->store.forget_given();
  impl_->store.refresh(impl_->table.find(name));
}

at::Tensor Engine::master(const std::string& name) const {
  impl_->refuse_half_an_update();
  const int entry = impl_->table.find(name);
  const int flat = impl_->table.entries()[static_cast<std::size_t>(entry)].flat;
  memory::AccountScope scope(impl_->ledger, memory::Account::other);
  return impl_->guarded(
      [&] { return impl_->store.view_of(entry, impl_->store.whole_master(flat)); });
}

void Engine::set_master(const std::string& name, const at::Tensor& values) {
  impl_->check_between_windows("set_master()");
  const int entry = impl_->table.find(name);
  const auto& sizes = impl_->store.parameters()[static_cast<std::size_t>(entry)].sizes();
  if (values.sizes() != sizes) {
    fail("engine", "set_master('", name, "') got a tensor of shape ", values.sizes(),
         "; the parameter's is ", sizes);
  }
  memory::AccountScope scope(impl_->ledger, memory::Account::other);
  impl_->saver.finish_reading();
  impl_->store.forget_given();
  impl_->store.write_master(entry, values);
}

// Not guarded: the ranks tell each other by notes how a save ends, and train on where it failed.
std::string Engine::save(const std::string& directory, const state::SaveOptions& options) {
  return impl_->save(directory, options);
}
state::Rehearsal Engine::rehearse_save(const std::string& directory) {
  return impl_->rehearse_save(directory);
}
void Engine::finish_save() { impl_->saver.finish(); }
state::Loaded Engine::load(const std::string& path, const state::LoadOptions& options) {
  impl_->check_between_windows("load()");
  impl_->store.forget_given();
  return impl_->load(path, options);
}

const Config& Engine::config() const { return impl_->config; }
const ParamTable& Engine::table() const { return impl_->table; }
void Engine::restart_peak() { impl_->ledger.reset_peak(); }
const memory::Ledger& Engine::ledger() const { return impl_->ledger; }
comm::Group& Engine::group() const { return *impl_->group; }
double Engine::learning_rate() const { return impl_->learning_rate(); }
std::int64_t Engine::accumulation() const { return impl_->accumulation(); }
double Engine::loss_scale() const { return impl_->scaler.scale(); }
std::int64_t Engine::updates() const { return impl_->updates; }
std::int64_t Engine::skipped_updates() const { return impl_->skipped; }
std::int64_t Engine::micro_batches() const { return impl_->micro_batches; }

// Stop 11's other half: the schedule counts applied updates.
double Engine::Impl::learning_rate() const {
  if (!given_groups.empty()) return given_groups.front().lr;
  auto policy = schedule;
  if (policy.total_updates == 0) policy.total_updates = config.train.max_updates;
  const auto counted = std::max<std::int64_t>(0, updates - schedule_from);
  const auto samples = config::micro_batch_size(config.batch) * accumulation() * group->size();
  return config.optimizer.lr * optim::batch_multiplier(config.optimizer, samples) *
         optim::schedule_multiplier(policy, counted);
}

std::vector<optim::GroupSettings> Engine::Impl::group_settings() const {
  if (!given_groups.empty()) return given_groups;
  std::vector<optim::GroupSettings> settings;
  const double lr = learning_rate();
  for (const auto& group : optimizer_states.groups)
    settings.push_back({lr * group.lr_multiplier, group.weight_decay});
  return settings;
}

}  // namespace poise
