// Stop 0: puts an engine together, once.
#include <ATen/ops/zeros_like.h>
#include <fnmatch.h>

#include <algorithm>

#include "engine/impl.h"

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

OptimizerSpans make_spans(const ParamTable& table, zero::FlatStore& store,
                          const config::OptimizerPolicy& policy, const optim::Optimizer& optimizer,
                          const memory::Ledger& ledger) {
  refuse_patterns_without_match(table, policy);
  OptimizerSpans made;
  for (std::size_t f = 0; f < table.flats().size(); ++f) {
    const auto& layout = table.flats()[f];
    if (!layout.trainable) continue;
    const auto& tensors = store.flat(static_cast<int>(f));
    optim::Span span;
    span.master = tensors.master;
    if (!tensors.master.is_same(tensors.values)) span.low = tensors.values;
    span.gradient = tensors.accumulator;
    memory::AccountScope scope(ledger, memory::Account::optimizer);
    for (int m = 0; m < optimizer.num_moments(); ++m)
      span.moments.push_back(at::zeros_like(tensors.master));
    for (const int e : layout.entries) {
      const auto& entry = table.entries()[static_cast<std::size_t>(e)];
      if (entry.numel == 0) continue;
      span.segments.push_back({entry.offset, entry.offset + entry.numel,
                               index_of(made.groups, group_of(entry, policy))});
    }
    made.spans.push_back(std::move(span));
  }
  if (made.spans.empty()) {
    fail("engine", "no parameter of the model is trainable; set requires_grad on those to train");
  }
  return made;
}

}  // namespace engine

namespace {

const Config& validated(const Config& config) {
  config.validate();
  return config;
}

memory::Ledger& with_budget(memory::Ledger& ledger, const config::MemoryPolicy& policy) {
  ledger.set_budget(policy.budget_bytes);
  return ledger;
}

}  // namespace

Engine::Impl::Impl(const ModelView& model, const Config& wanted)
    : config(validated(wanted)),
      accumulation(config::accumulation(config.batch)),
      table(model),
      store(model, table, config.precision, with_budget(ledger, config.memory)),
      gradients(table, store),
      optimizer(optim::make_optimizer(config.optimizer)),
      optimizer_spans(engine::make_spans(table, store, config.optimizer, *optimizer, ledger)),
      scaler(config.precision),
      loss_weights(config.engine.loss_weighting, scales_loss(),
                   store.parameters().front().device()),
      device(store.parameters().front().device()) {}

}  // namespace poise
