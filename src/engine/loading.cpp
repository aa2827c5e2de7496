// A saved state becomes this engine's: first every rank checks all of it, then all take it.
#include <ATen/core/grad_mode.h>
#include <fnmatch.h>

#include <algorithm>
#include <set>

#include "engine/impl.h"
#include "poise/log.h"
#include "state/random.h"
#include "state/safetensors.h"

namespace poise {
namespace {

constexpr std::int64_t kTileElements = std::int64_t{1} << 20;

// "a, b, c and 4 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > kMost) text += " and " + std::to_string(names.size() - kMost) + " more";
  return text;
}

bool is_wanted(const ParamTable::Entry& entry, const state::LoadOptions& options) {
  const auto fits = [&](const std::string& name) {
    return std::any_of(options.only.begin(), options.only.end(), [&](const std::string& pattern) {
      return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    });
  };
  return options.only.empty() || fits(entry.name) ||
         std::any_of(entry.aliases.begin(), entry.aliases.end(), fits);
}

const state::SavedParameter* saved_of(const ParamTable::Entry& entry, const state::Saved& saved) {
  if (const auto* found = saved.parameter(entry.name)) return found;
  for (const auto& alias : entry.aliases) {
    if (const auto* found = saved.parameter(alias)) return found;
  }
  return nullptr;
}

void refuse_differences(const state::Saved& saved, const char* what,
                        const std::vector<std::string>& missing,
                        const std::vector<std::string>& extra) {
  if (missing.empty() && extra.empty()) return;
  fail("engine", saved.path(), " is of another model: ",
       missing.empty() ? std::string() : join("it has no ", what, ' ', listed(missing)),
       missing.empty() || extra.empty() ? "" : ", and ",
       extra.empty() ? std::string() : join("the model has no ", what, ' ', listed(extra)),
       "; build the model that was saved, or load weights only with a list of names");
}

void check_parameters(const state::Saved& saved, const ParamTable& table,
                      const state::LoadOptions& options) {
  std::vector<std::string> missing, extra;
  std::set<std::string> met;
  for (const auto& entry : table.entries()) {
    if (!is_wanted(entry, options)) continue;
    const auto* found = saved_of(entry, saved);
    if (!found) {
      missing.push_back(entry.name);
      continue;
    }
    met.insert(found->name);
    if (found->shape != entry.sizes) {
      fail("engine", "parameter '", entry.name, "' has shape ", at::IntArrayRef(entry.sizes),
           ", and ", at::IntArrayRef(found->shape), " in ", saved.path(),
           "; build the model that was saved");
    }
    if (found->trainable != entry.trainable && !options.weights_only) {
      fail("engine", "parameter '", entry.name, "' is ", entry.trainable ? "trained" : "frozen",
           ", and was ", found->trainable ? "trained" : "frozen", " in ", saved.path(),
           "; set requires_grad as it was, or load weights only");
    }
  }
  for (const auto& parameter : saved.manifest().parameters) {
    if (options.only.empty() && met.count(parameter.name) == 0) extra.push_back(parameter.name);
  }
  refuse_differences(saved, "parameter", missing, extra);
  if (met.empty()) {
    fail("engine", "no parameter matches ", listed(options.only), "; patterns use * and ?");
  }
}

void check_buffers(const state::Saved& saved, const std::vector<NamedTensor>& buffers) {
  std::vector<std::string> missing, extra;
  std::set<std::string> known;
  for (const auto& [name, tensor] : buffers) {
    known.insert(name);
    const auto& all = saved.manifest().buffers;
    const auto found =
        std::find_if(all.begin(), all.end(), [&, name = name](auto& b) { return b.name == name; });
    const auto values = saved.whole(state::kBuffer, name, 0);
    if (found == all.end() || !values.defined()) {
      missing.push_back(name);
      continue;
    }
    if (tensor.sizes() != at::IntArrayRef(found->shape) ||
        state::dtype_name(tensor.scalar_type()) != found->dtype ||
        values.scalar_type() != tensor.scalar_type() || values.numel() != tensor.numel()) {
      fail("engine", "buffer '", name, "' has shape ", tensor.sizes(), " and type ",
           state::dtype_name(tensor.scalar_type()), ", and ", at::IntArrayRef(found->shape),
           " and ", found->dtype, " in ", saved.path(), "; build the model that was saved");
    }
  }
  for (const auto& buffer : saved.manifest().buffers) {
    if (known.count(buffer.name) == 0) extra.push_back(buffer.name);
  }
  refuse_differences(saved, "buffer", missing, extra);
}

void check_optimizer(const state::Saved& saved, const optim::Optimizer& optimizer) {
  const auto& m = saved.manifest();
  if (m.optimizer == optimizer.name() && m.moments == engine::saved_moments(optimizer)) return;
  fail("engine", saved.path(), " was saved with the optimizer ", m.optimizer, " (",
       m.moments.size(), " moments), and this engine has ", optimizer.name(), " (",
       optimizer.num_moments(), "); use that one, or load weights only");
}

// Blocks of elements are runs of memory: they hold for one order of dimensions alone.
void check_order(const state::Saved& saved, const optim::Optimizer& optimizer,
                 const ParamTable& table, const std::vector<at::Tensor>& parameters) {
  const auto moments = optimizer.moments();
  if (std::all_of(moments.begin(), moments.end(), [](auto& m) { return m.block == 1; })) return;
  for (std::size_t e = 0; e < table.entries().size(); ++e) {
    const auto* from = saved_of(table.entries()[e], saved);
    const auto order = state::order_of(parameters[e].sizes(), parameters[e].strides());
    if (from == nullptr || state::same_order(from->shape, from->order, order)) continue;
    fail("engine", "parameter '", from->name, "' lies in memory in another order than in ",
         saved.path(), ", and ", optimizer.name(),
         " has moments of blocks of it; build the model as it was saved, or load weights only");
  }
}

}  // namespace

state::Loaded Engine::Impl::load(const std::string& path, const state::LoadOptions& options) {
  if (!options.only.empty() && !options.weights_only) {
    fail("engine",
         "load() of some names only, which would leave the rest of the optimizer behind; "
         "set weights_only too");
  }
  refuse_to_mend_in_part(options);
  at::NoGradGuard no_grad;
  memory::AccountScope scope(ledger, memory::Account::staging);
  std::optional<state::Saved> saved;
  const auto problem = guarded([&] { return open_save(path, options, saved); });
  if (!problem.empty()) throw Error(problem);  // on all ranks, whose group goes on
  guarded([&] {
    half_loaded = options;
    take(*saved, options);
    half_loaded.reset();
    half_an_update.clear();
  });
  const auto& m = saved->manifest();
  return {saved->path(), static_cast<int>(m.ranks), m.cursor, m.user,
          saved->own(group->rank(), group->size())};
}

// What rank 0 finds; then no rank touches anything before all have found everything in order.
// Returns what some rank has to say against it.
std::string Engine::Impl::open_save(const std::string& path, const state::LoadOptions& options,
                                    std::optional<state::Saved>& saved) {
  saver.finish();
  notice_edits();
  const auto where = group->all_gather_text(state::find(path), "the save to load").front();
  std::string problem;
  try {
    if (where.empty()) {
      fail("engine", "no whole save in ", path, "; give a save or a directory that holds one");
    }
    saved.emplace(where);
    check_parameters(*saved, table, options);
    if (options.only.empty()) check_buffers(*saved, buffers);
    if (!options.weights_only) {
      check_optimizer(*saved, *optimizer);
      check_order(*saved, *optimizer, table, store.parameters());
    }
    saved->verify(group->rank(), group->size());
  } catch (const Error& error) {
    problem = error.what();
  }
  const auto problems = group->all_gather_text(problem, "checks of the save");
  const auto first =
      std::find_if(problems.begin(), problems.end(), [](auto& p) { return !p.empty(); });
  return first == problems.end() ? std::string() : *first;
}

// What failed midway has left something that such a load would leave as it is.
void Engine::Impl::refuse_to_mend_in_part(const state::LoadOptions& options) const {
  if (!options.weights_only) return;
  const bool weights_alone = half_loaded && half_loaded->weights_only && half_an_update.empty();
  if ((!half_loaded && half_an_update.empty()) || (weights_alone && options.only.empty())) return;
  fail("engine", "load() of ", options.only.empty() ? "weights" : "some names", " only came after ",
       half_an_update.empty() ? "a load that failed midway"
                              : join("update ", updates + 1, " ended in its middle"),
       ", whose other half it would leave; load a whole save first");
}

void Engine::Impl::take(const state::Saved& saved, const state::LoadOptions& options) {
  std::vector<Event> gathers;
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    take_flat(flat, saved, options);
    const bool trainable = table.flats()[static_cast<std::size_t>(flat)].trainable;
    if (trainable && shards.splits_optimizer() && !shards.splits_parameters(flat)) {
      gathers.push_back(store.gather_values(flat));
    }
  }
  for (const auto& gather : gathers) gather.wait();
  if (options.only.empty()) take_buffers(saved);
  if (options.weights_only) return;
  const auto& progress = saved.manifest().progress;
  updates = progress.updates;
  skipped = progress.skipped;
  for (std::size_t e = 0; e < table.entries().size(); ++e) {
    const auto* from = saved_of(table.entries()[e], saved);
    freezing.set_missed(static_cast<int>(e), from == nullptr ? 0 : from->missed);
  }
  // What the save does not know begins anew, whatever this engine has come to by now.
  scaler = precision::LossScaler(config.precision);
  loss_weights.resume({});
  if (scales_loss() && progress.loss_weight_exponent) {
    scaler.load({progress.loss_scale, progress.clean_updates, progress.overflows_in_row});
    loss_weights.resume(static_cast<int>(*progress.loss_weight_exponent));
  }
  noise = {};
  if (progress.noise) noise.load({progress.noise->variance, progress.noise->signal});
  take_random_states(saved);
}

void Engine::Impl::take_factors(const engine::OptimizerState& kept, std::size_t moment,
                                const state::Saved& saved) {
  const auto values = kept.moments[moment]->tensor();
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < kept.parameters.size(); ++i) {
    const int e = table.flats()[static_cast<std::size_t>(kept.flat)].entries[i];
    const auto& from = *saved_of(table.entries()[static_cast<std::size_t>(e)], saved);
    const auto count = optim::factored_numel(kept.parameters[i]);
    saved.read(state::moment(static_cast<std::int64_t>(moment)), from, 0, from.order,
               values.narrow(0, begin, count));
    begin += count;
  }
}

void Engine::Impl::take_flat(int flat, const state::Saved& saved,
                             const state::LoadOptions& options) {
  const auto& layout = table.flats()[static_cast<std::size_t>(flat)];
  auto& tensors = store.flat(flat);
  const bool split = shards.splits_parameters(flat);
  const auto held = layout.trainable ? shards.optimized(flat)
                    : split          ? shards.mine(flat)
                                     : zero::Range{0, shards.whole(flat)};
  const auto& states = optimizer_states.states;
  const auto kept = std::find_if(states.begin(), states.end(),
                                 [&](const auto& state) { return state.flat == flat; });
  for (const int e : layout.entries) {
    const auto& entry = table.entries()[static_cast<std::size_t>(e)];
    if (!is_wanted(entry, options)) continue;
    const auto part = zero::overlap({entry.offset, entry.offset + entry.numel}, held);
    if (part.size() == 0) continue;
    const auto& parameter = store.parameters()[static_cast<std::size_t>(e)];
    const auto order = state::order_of(parameter.sizes(), parameter.strides());
    const auto& from = *saved_of(entry, saved);
    const auto read = [&](const std::string& kind, const at::Tensor& values,
                          std::int64_t block = 1) {
      saved.read(
          kind, from, (part.begin - entry.offset) / block, order,
          values.narrow(0, (part.begin - held.begin) / block, (part.size() + block - 1) / block));
    };
    // What lives in a file goes there tile by tile.
    const auto read_span = [&](const std::string& kind, offload::Span& span,
                               std::int64_t block = 1) {
      if (const auto here = span.tensor(); here.defined()) return read(kind, here, block);
      const auto count = (part.size() + block - 1) / block;
      // In another order a read goes through the whole parameter: then once.
      const bool in_order = state::same_order(from.shape, from.order, order);
      const auto most = in_order ? std::min(count, kTileElements) : count;
      const auto tile = offloading.memory().allocate(most, span.dtype());
      for (std::int64_t at = 0; at < count; at += most) {
        const auto values = tile.narrow(0, 0, std::min(most, count - at));
        saved.read(kind, from, (part.begin - entry.offset) / block + at, order, values);
        span.write((part.begin - held.begin) / block + at, values);
      }
    };
    const auto* kind = from.trainable ? state::kMaster : state::kValue;
    if (layout.trainable) {
      read_span(kind, *tensors.master);
    } else if (split) {
      read_span(kind, *tensors.shard);
    } else {
      read(kind, tensors.values);
    }
    if (!layout.trainable || options.weights_only) continue;
    for (std::size_t n = 0; n < kept->moments.size(); ++n) {
      if (kept->blocks[n] == 0) continue;
      read_span(state::moment(static_cast<std::int64_t>(n)), *kept->moments[n], kept->blocks[n]);
    }
  }
  for (std::size_t n = 0; layout.trainable && n < kept->moments.size(); ++n) {
    if (kept->blocks[n] == 0 && !options.weights_only) take_factors(*kept, n, saved);
  }
  if (!tensors.own_master) return;
  const auto low = store.optimized_values(flat);
  if (const auto here = low->tensor(); here.defined()) return tensors.master->read(0, here);
  const auto most = std::min(low->numel(), kTileElements);
  const auto tile = offloading.memory().allocate(most, low->dtype());
  for (std::int64_t at = 0; at < low->numel(); at += most) {
    const auto rounded = tile.narrow(0, 0, std::min(most, low->numel() - at));
    tensors.master->read(at, rounded);
    low->write(at, rounded);
  }
}

void Engine::Impl::take_buffers(const state::Saved& saved) {
  const bool as_many = saved.manifest().ranks == group->size();
  for (const auto& [name, tensor] : buffers) {
    auto values = as_many ? saved.whole(state::kBuffer, name, group->rank()) : at::Tensor();
    if (!values.defined()) values = saved.whole(state::kBuffer, name, 0);
    tensor.detach().copy_(values.view(tensor.sizes()));
  }
}

void Engine::Impl::take_random_states(const state::Saved& saved) {
  for (const auto& one : state::generators_of(device)) {
    const auto name = state::generator_name(one);
    const auto values = saved.manifest().ranks == group->size()
                            ? saved.whole(state::kRandom, name, group->rank())
                            : at::Tensor();
    if (values.defined()) {
      state::set_random_state(one, values);
      continue;
    }
    log::info("random numbers of the ", name, " begin anew: the save is of ",
              saved.manifest().ranks, " ranks, or of another device");
    state::seed_anew(one, config.engine.seed, group->rank(), updates);
  }
}

}  // namespace poise
