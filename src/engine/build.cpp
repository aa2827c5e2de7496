// Stop 0: puts an engine together, once.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fnmatch.h>

#include <algorithm>

#include "engine/impl.h"
#include "poise/log.h"

namespace poise {
namespace engine {
namespace {

bool decays(const ParamTable::Entry& entry, const config::OptimizerPolicy& policy) {
  return policy.decay_rule == "all" || entry.sizes.size() >= 2;
}

bool matches(const std::string& pattern, const ParamTable::Entry& entry) {
  const auto fits = [&](const std::string& name) {
    return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
  return fits(entry.name) || std::any_of(entry.aliases.begin(), entry.aliases.end(), fits);
}

// First matching group of the config wins; its decay, where given, holds for all its parameters.
Group group_of(const ParamTable::Entry& entry, const config::OptimizerPolicy& policy) {
  Group group{1.0, decays(entry, policy) ? policy.weight_decay : 0.0};
  for (const auto& wanted : policy.groups) {
    if (!matches(wanted.match, entry)) continue;
    group.lr_multiplier = wanted.lr_multiplier;
    if (wanted.weight_decay >= 0) group.weight_decay = wanted.weight_decay;
    break;
  }
  return group;
}

int index_of(std::vector<Group>& groups, const Group& wanted) {
  const auto same = [&](const Group& g) {
    return g.lr_multiplier == wanted.lr_multiplier && g.weight_decay == wanted.weight_decay;
  };
  const auto it = std::find_if(groups.begin(), groups.end(), same);
  if (it != groups.end()) return static_cast<int>(it - groups.begin());
  groups.push_back(wanted);
  return static_cast<int>(groups.size()) - 1;
}

void refuse_patterns_without_match(const ParamTable& table, const config::OptimizerPolicy& policy) {
  for (const auto& group : policy.groups) {
    const auto& entries = table.entries();
    if (std::none_of(entries.begin(), entries.end(),
                     [&](auto& e) { return matches(group.match, e); })) {
      fail("engine", "parameter group '", group.match,
           "' matches no parameter; patterns use * and ?, names "
           "look like '",
           entries.front().name, "'");
    }
  }
}

}  // namespace

namespace {

// FNV-1a: of the name alone, so that neither the layout nor the order of parameters counts.
std::uint64_t number_of(const std::string& name) {
  std::uint64_t number = 14695981039346656037u;
  for (const char c : name) number = (number ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return number;
}

}  // namespace

std::vector<optim::Segment> segments_of(const ParamTable& table, const zero::Shards& shards,
                                        int flat, const std::function<int(int)>& group_of) {
  std::vector<optim::Segment> segments;
  const auto optimized = shards.optimized(flat);
  const auto& entries = table.flats()[static_cast<std::size_t>(flat)].entries;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const int e = entries[i];
    const auto& entry = table.entries()[static_cast<std::size_t>(e)];
    const int group = group_of(e);
    const auto part = zero::overlap({entry.offset, entry.offset + entry.numel}, optimized);
    if (part.size() == 0) continue;
    segments.push_back({part.begin - optimized.begin, part.end - optimized.begin, group,
                        part.begin - entry.offset, number_of(entry.name), static_cast<int>(i)});
  }
  return segments;
}

namespace {

offload::SpanPtr make_moment(const OptimizerState& state, const optim::Moment& moment,
                             c10::Device device, const memory::Ledger& ledger,
                             const Offloading& offloading) {
  if (moment.factored) {
    std::int64_t numel = 0;
    for (const auto& parameter : state.parameters) numel += optim::factored_numel(parameter);
    memory::AccountScope scope(ledger, memory::Account::optimizer);
    return offload::resident(at::zeros({numel}, at::TensorOptions(moment.dtype)));
  }
  const auto numel = state.master->numel() / moment.block;
  if (const auto place = offloading.states_of(state.flat)) {
    return place->reserve(numel, moment.dtype);
  }
  memory::AccountScope scope(ledger, memory::Account::optimizer);
  return offload::resident(at::zeros({numel}, at::TensorOptions(moment.dtype).device(device)));
}

}  // namespace

namespace {

std::vector<optim::Parameter> parameters_of(const ParamTable::Flat& layout,
                                            const zero::FlatStore& store) {
  std::vector<optim::Parameter> parameters;
  for (const int e : layout.entries) {
    const auto& tensor = store.parameters()[static_cast<std::size_t>(e)];
    parameters.push_back({tensor.sizes().vec(), tensor.strides().vec()});
  }
  return parameters;
}

}  // namespace

OptimizerStates make_states(const ParamTable& table, zero::FlatStore& store,
                            const zero::Shards& shards, const config::OptimizerPolicy& policy,
                            const optim::Optimizer& optimizer, const memory::Ledger& ledger,
                            const Offloading& offloading) {
  OptimizerStates made;
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    const auto& layout = table.flats()[static_cast<std::size_t>(flat)];
    if (!layout.trainable) continue;
    const auto& tensors = store.flat(flat);
    OptimizerState state;
    state.flat = flat;
    state.master = tensors.master;
    if (tensors.own_master) state.low = store.optimized_values(flat);
    state.gradient = store.optimized_gradient(flat);
    if (optimizer.rounds() > 0) state.parameters = parameters_of(layout, store);
    for (const auto& moment : optimizer.moments()) {
      state.moments.push_back(
          make_moment(state, moment, tensors.values.device(), ledger, offloading));
      state.blocks.push_back(moment.factored ? 0 : moment.block);
    }
    state.segments = segments_of(table, shards, flat, [&](int e) {
      return index_of(made.groups, group_of(table.entries()[static_cast<std::size_t>(e)], policy));
    });
    made.states.push_back(std::move(state));
  }
  return made;
}

}  // namespace engine

namespace {

const Config& validated(const Config& config) {
  config.validate();
  return config;
}

std::shared_ptr<comm::Group> group_for(std::shared_ptr<comm::Group> given, const ModelView& model,
                                       const Config& config) {
  if (model.parameters.empty() || !model.parameters.front().tensor.defined()) {
    return given ? given : comm::one_rank();  // refused by name a little later
  }
  const auto device = model.target();
  if (model.device && device.is_cuda() && !device.has_index()) {
    fail("engine", "ModelView.device is ", device, " without a number; name the device, ", device,
         ":0 for the first");
  }
  if (!given) return comm::one_rank(device);
  if (given->size() == 1) return given->device() == device ? given : comm::one_rank(device);
  if (given->device().type() != device.type()) {
    fail("engine", "the model is on ", device, " and the group of ranks carries tensors of ",
         given->device(), " (", given->backend(), "); use a group for the model's device");
  }
  if (!config.precision.fp32_accumulation) {
    fail("engine", "precision.fp32_accumulation is off in a group of ", given->size(),
         " ranks; gradients are summed over ranks in fp32: set it on");
  }
  return given;
}

// Only stage 3 keeps small parameters apart.
std::int64_t small_below(const config::ZeroPolicy& policy) {
  return policy.stage == 3 ? policy.persistence_threshold : 0;
}

comm::Ranks ranks_for(comm::Ranks given, const ModelView& model, const Config& config) {
  comm::Ranks ranks{group_for(given.all, model, config), given.shard, given.replica};
  if (ranks.all->size() == 1) ranks.shard = ranks.replica = nullptr;
  if (!ranks.shard) ranks.shard = ranks.all;
  if (!ranks.replica) ranks.replica = comm::one_rank(ranks.all->device());
  const auto& [all, shard, replica] = ranks;
  const auto wanted = config.zero.shard_group_size;
  if (wanted > 0 && all->size() > 1 && wanted != shard->size()) {
    fail("engine", "zero.shard_group_size is ", wanted, ", but of the ", all->size(),
         " ranks given ", shard->size(),
         " shard among themselves; give ranks that are divided so, "
         "as those of comm::ranks_from_environment(zero.shard_group_size)");
  }
  if (shard->size() * replica->size() != all->size() ||
      replica->rank() * shard->size() + shard->rank() != all->rank()) {
    fail("engine", "rank ", all->rank(), " of ", all->size(), " is rank ", shard->rank(), " of ",
         shard->size(), " in its shard group and rank ", replica->rank(), " of ", replica->size(),
         " among its replicas; shard groups are contiguous blocks of ranks of one size, replica "
         "groups the ranks of equal place in them");
  }
  if (config.offload.gradients != config::Offload::none && !all->device().is_cpu() &&
      replica->size() > 1) {
    fail("engine",
         "offload.gradients is set on GPUs in shard groups, whose sums are joined over the groups "
         "in memory of the device only; leave it out, or let all ranks shard together "
         "(zero.shard_group_size 0)");
  }
  return ranks;
}

// What can be refused is refused here, before anything of the model moves.
ParamTable agreed(const ModelView& model, const Config& config, comm::Group& group) {
  ParamTable table(model, small_below(config.zero));
  if (group.size() > 1) engine::check_ranks_agree(group, model, table, config);
  engine::refuse_patterns_without_match(table, config.optimizer);
  const auto& entries = table.entries();
  if (std::none_of(entries.begin(), entries.end(), [](auto& e) { return e.trainable; })) {
    fail("engine", "no parameter of the model is trainable; set requires_grad on those to train");
  }
  return table;
}

// To where the model is to be. Only once nothing can refuse the model any more.
void move_buffers(const ModelView& model) {
  if (!model.device) return;
  at::NoGradGuard no_grad;
  for (auto buffer : model.buffers) {
    if (buffer.tensor.device() != *model.device) {
      buffer.tensor.set_data(buffer.tensor.to(*model.device));
    }
  }
}

// All ranks start from rank 0's buffers, as from its parameters.
void share_buffers(const ModelView& model, comm::Group& group) {
  if (group.size() == 1) return;
  at::NoGradGuard no_grad;
  for (const auto& buffer : model.buffers) {
    if (buffer.tensor.numel() == 0) continue;
    auto values = buffer.tensor.detach().to(group.device()).contiguous();
    group.broadcast(values.reshape({-1}).view(at::kByte), 0, buffer.name).wait();
    buffer.tensor.detach().copy_(values);
  }
}

std::chrono::milliseconds timeout_of(const config::CommPolicy& policy) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(policy.timeout_seconds));
}

state::SaverSettings saver_settings(const Config& config, const std::string& run) {
  // A save that is waited for needs no more than what is on its way: few tiles, warm in the cache.
  constexpr std::int64_t kOnItsWay = 8 * static_cast<std::int64_t>(state::kTile);
  const bool behind = config.state.asynchronous;
  state::SaverSettings settings{timeout_of(config.comm),
                                behind ? config.state.staging_bytes : kOnItsWay};
  settings.keeps_staging = behind;
  if (!run.empty()) settings.id = run;
  return settings;
}

// Another engine may have left notes in this group before. Empty in a world of one.
std::string name_of_run(comm::Group& group) {
  if (group.size() == 1) return "";
  return group.all_gather_text(state::random_word(), "name of the run").front();
}

memory::Ledger& with_budget(memory::Ledger& ledger, const config::MemoryPolicy& policy,
                            c10::Device device) {
  ledger.set_device(device);
  ledger.set_budget(policy.budget_bytes);
  return ledger;
}

}  // namespace

std::shared_ptr<zero::Units> Engine::Impl::make_units() {
  if (!shards.splits_parameters()) return nullptr;
  return std::make_shared<zero::Units>(table, store, shards, following,
                                       config.zero.keep_gathered == config::KeepGathered::window,
                                       [this](int unit) { gradients.join_unit(unit); });
}

std::optional<checkpointing::ActivationOffload> Engine::Impl::make_activations(
    const ModelView& model) {
  move_buffers(model);  // known by their memory from here on
  const auto place = offloading.store_of_activations();
  if (!place) return std::nullopt;
  std::vector<at::Tensor> stay;
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    stay.push_back(store.flat(flat).values);
  }
  for (const auto& buffer : model.buffers) stay.push_back(buffer.tensor);
  return checkpointing::ActivationOffload(place, config.offload.activation_min_bytes, stay);
}

Engine::Impl::Impl(const ModelView& model, const Config& wanted, comm::Ranks given,
                   const Materialize& materialize)
    : config(validated(wanted)),
      buffer_places(model.buffers),
      buffers(model.buffers),
      ranks(ranks_for(std::move(given), model, config)),
      group(ranks.all),
      table(agreed(model, config, *group)),
      shards(table, config.zero, ranks.shard->rank(), ranks.shard->size(),
             config.offload.parameters != config::Offload::none),
      offloading(config.offload, table, shards, model.target()),
      store(model, table, config.precision, shards, ranks,
            with_budget(ledger, config.memory, group->device()), offloading.places(), materialize),
      run(name_of_run(*group)),
      following(*group, run, timeout_of(config.comm),
                group->device().is_cpu() ? zero::Following::Looks::in_waits
                                         : zero::Following::Looks::by_thread),
      gradients(table, store, shards, ranks, config.zero, following, ledger),
      gathers(table, store, shards, ranks, ledger),
      units(make_units()),
      activations(make_activations(model)),
      optimizer(optim::make_optimizer(config.optimizer, config.engine.seed)),
      optimizer_states(engine::make_states(table, store, shards, config.optimizer, *optimizer,
                                           ledger, offloading)),
      state_update(optimizer_states.states, config.offload, offloading.memory()),
      freezing(table, store.parameters()),
      scaler(config.precision),
      loss_weights(config.engine.loss_weighting, scales_loss(), store.parameters().front().device(),
                   *group, [this](const Event& event) { following.synchronize(event); }),
      device(store.parameters().front().device()),
      saver(group, offloading.memory(), saver_settings(config, run)) {
  share_buffers(model, *group);
  store.made();
  buffer_places.made();
}

void Engine::Impl::unmake() {
  check_between_windows("unmake()");
  refuse_half_an_update();
  saver.finish_reading();
  store.give_back(zero::FlatStore::Together::yes);
  buffer_places.give_back();
}

namespace engine {

BufferPlaces::BufferPlaces(const std::vector<NamedTensor>& buffers) {
  for (const auto& buffer : buffers) places_.emplace_back(buffer.tensor, buffer.tensor.device());
}

void BufferPlaces::give_back() {
  at::NoGradGuard no_grad;
  for (auto& [buffer, device] : places_) {
    if (buffer.device() != device) buffer.set_data(buffer.to(device));
  }
}

BufferPlaces::~BufferPlaces() {
  if (is_made_) return;
  try {
    give_back();
  } catch (const std::exception& error) {
    log::warning("[engine] buffers of a model stay on the device of an engine that was not made: ",
                 error.what());
  }
}

}  // namespace engine

}  // namespace poise
