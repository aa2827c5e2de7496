// What a loop of its own sets instead of the config: groups and their learning rates, moments, the
// length of a window, the clipping of one update.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "engine/impl.h"

namespace poise {

using engine::WindowState;

namespace {

// Arrays of the parameter's shape, which another loop can read and write.
void check_shaped(const optim::Optimizer& optimizer, const char* call) {
  for (const auto& moment : optimizer.moments()) {
    if (moment.block == 1 && moment.dtype != at::kByte && !moment.factored) continue;
    fail("engine", call, ": ", optimizer.name(),
         " keeps its moments in another form than numbers of the parameter's shape; save() and "
         "load() keep them as they are");
  }
}

void check_closed(const WindowState state, std::int64_t micro_batches, const char* call) {
  if (state == WindowState::closed) return;
  fail("engine", call, " was called in an open window of ", micro_batches,
       " micro-batches; call it between windows");
}

}  // namespace

void Engine::set_accumulation(std::int64_t micro_batches) {
  check_closed(impl_->state, impl_->micro_batches, "set_accumulation()");
  if (micro_batches < 1) {
    fail("engine", "set_accumulation() got ", micro_batches,
         "; a window has 1 micro-batch or more");
  }
  impl_->set_accumulation = micro_batches;
}

double Engine::clip_grad_norm(double max_norm) {
  if (!(max_norm > 0)) {
    fail("engine", "clip_grad_norm() got ", max_norm, "; give a norm above 0, or leave it out");
  }
  if (impl_->state != WindowState::summed) begin_update();
  impl_->guarded([&] { impl_->take_edited_gradients(); });
  impl_->clip_at = max_norm;
  return impl_->sums.grad_norm;
}

void Engine::group_parameters(const std::vector<std::vector<std::string>>& groups) {
  check_closed(impl_->state, impl_->micro_batches, "group_parameters()");
  const auto& entries = impl_->table.entries();
  std::vector<int> group_of(entries.size(), -1);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const auto& name : groups[g]) {
      auto& group = group_of[static_cast<std::size_t>(impl_->table.find(name))];
      if (group >= 0 && group != static_cast<int>(g)) {
        fail("engine", "parameter '", name, "' is in two groups, ", group, " and ", g,
             "; name it once");
      }
      group = static_cast<int>(g);
    }
  }
  for (std::size_t e = 0; e < entries.size(); ++e) {
    if (entries[e].trainable && group_of[e] < 0) {
      fail("engine", "parameter '", entries[e].name,
           "' is in no group; name every trainable parameter");
    }
  }
  for (auto& state : impl_->optimizer_states.states) {
    state.segments = engine::segments_of(impl_->table, impl_->shards, state.flat,
                                         [&](int entry) { return group_of[entry]; });
  }
  // The decay of the config is that of parameters by shape: the groups say their own now.
  impl_->given_groups.assign(groups.size(), {impl_->learning_rate(), 0.0});
}

void Engine::set_hyperparameters(const std::vector<optim::GroupSettings>& groups,
                                 const OptimizerConstants& constants) {
  if (groups.empty() || groups.size() != impl_->given_groups.size()) {
    fail("engine", "set_hyperparameters() got settings of ", groups.size(), " groups; there are ",
         impl_->given_groups.size(), ", as group_parameters() said");
  }
  auto policy = impl_->config.optimizer;
  policy.beta1 = constants.beta1;
  policy.beta2 = constants.beta2;
  policy.eps = constants.eps;
  policy.momentum = constants.momentum;
  auto changed = optim::make_optimizer(policy, impl_->config.engine.seed);
  if (changed->num_moments() != impl_->optimizer->num_moments()) {
    fail("engine", "momentum ", constants.momentum, " needs ", changed->num_moments(),
         " moments, but the engine was made with ", impl_->optimizer->num_moments(),
         "; make the engine with the momentum that is to come");
  }
  impl_->optimizer = std::move(changed);
  impl_->given_groups = groups;
}

std::vector<at::Tensor> Engine::moments(const std::string& name) const {
  check_shaped(*impl_->optimizer, "moments()");
  const auto [index, entry] = impl_->state_of(name);
  memory::AccountScope scope(impl_->ledger, memory::Account::other);
  return impl_->guarded([&] {
    std::vector<at::Tensor> whole;
    const auto& state = impl_->optimizer_states.states[index];
    const auto floats = at::TensorOptions(at::kFloat).device(impl_->device);
    for (const auto& moment : state.moments) {
      const auto mine = at::empty({moment->numel()}, floats);
      moment->read(0, mine);
      whole.push_back(impl_->store.view_of(entry, impl_->store.whole_moment(state.flat, mine)));
    }
    return whole;
  });
}

void Engine::set_moments(const std::string& name, const std::vector<at::Tensor>& values) {
  check_closed(impl_->state, impl_->micro_batches, "set_moments()");
  check_shaped(*impl_->optimizer, "set_moments()");
  const auto [index, entry] = impl_->state_of(name);
  auto& moments = impl_->optimizer_states.states[index].moments;
  if (values.size() != moments.size()) {
    fail("engine", "set_moments('", name, "') got ", values.size(), " tensors; ",
         impl_->optimizer->name(), " keeps ", moments.size());
  }
  const auto& place = impl_->table.entries()[static_cast<std::size_t>(entry)];
  const auto& parameter = impl_->store.parameters()[static_cast<std::size_t>(entry)];
  const auto mine = impl_->shards.optimized(place.flat);
  const auto part = zero::overlap({place.offset, place.offset + place.numel}, mine);
  memory::AccountScope scope(impl_->ledger, memory::Account::other);
  at::NoGradGuard no_grad;
  for (const auto& value : values) {
    if (value.sizes() == parameter.sizes()) continue;
    fail("engine", "set_moments('", name, "') got a tensor of shape ", value.sizes(),
         "; the parameter's is ", parameter.sizes());
  }
  impl_->saver.finish_reading();
  for (std::size_t m = 0; m < values.size() && part.size() > 0; ++m) {
    // In the order of the parameter's memory, which need not be that of its indices.
    const auto piece =
        at::zeros({place.numel}, at::TensorOptions(at::kFloat).device(impl_->device));
    piece.as_strided(parameter.sizes(), parameter.strides()).copy_(values[m]);
    moments[m]->write(part.begin - mine.begin,
                      piece.narrow(0, part.begin - place.offset, part.size()));
  }
}

void Engine::set_updates(std::int64_t updates) {
  check_closed(impl_->state, impl_->micro_batches, "set_updates()");
  if (updates < 0) fail("engine", "set_updates() got ", updates, "; give 0 or more");
  impl_->updates = updates;
  impl_->freezing.limit_missed(updates);
}

std::int64_t Engine::missed_updates(const std::string& name) const {
  return impl_->freezing.missed(impl_->state_of(name).second);
}

void Engine::set_missed_updates(const std::string& name, std::int64_t updates) {
  check_closed(impl_->state, impl_->micro_batches, "set_missed_updates()");
  if (updates < 0 || updates > impl_->updates) {
    fail("engine", "set_missed_updates('", name, "') got ", updates, " of ", impl_->updates,
         " updates; give 0 or more, and no more than these");
  }
  impl_->freezing.set_missed(impl_->state_of(name).second, updates);
}

void Engine::set_schedule(const config::SchedulePolicy& policy, std::int64_t from) {
  check_closed(impl_->state, impl_->micro_batches, "set_schedule()");
  if (from < 0) fail("engine", "set_schedule() got ", from, " updates before; give 0 or more");
  impl_->schedule = policy;
  impl_->schedule_from = from;
}

std::pair<std::size_t, int> Engine::Impl::state_of(const std::string& name) const {
  const int entry = table.find(name);
  const auto& place = table.entries()[static_cast<std::size_t>(entry)];
  if (!place.trainable) fail("engine", "parameter '", name, "' is frozen and has no moments");
  const auto& states = optimizer_states.states;
  const auto found = std::find_if(states.begin(), states.end(),
                                  [&](const auto& state) { return state.flat == place.flat; });
  POISE_CHECK(found != states.end());
  return {static_cast<std::size_t>(found - states.begin()), entry};
}

}  // namespace poise
