// One training over several ranks (threads), and what every rank ended with.
#pragma once

#include <ATen/Parallel.h>

#include <functional>
#include <mutex>

#include "poise/engine.h"
#include "support/grid_model.h"
#include "support/ranks.h"

namespace poise::test {

inline config::OptimizerPolicy adamw() {
  config::OptimizerPolicy policy;
  policy.lr = 1e-2;
  policy.weight_decay = 0.1;
  policy.max_grad_norm = 0.5;
  return policy;
}

struct Training {
  int ranks = 2;
  int updates = 3;
  Config config = {};
  // Micro-batches of an update, for all ranks: rank r's are the r-th contiguous block, of
  // `counts[r]` where given, else equal ones.
  std::function<std::vector<at::Tensor>(int update)> window;
  std::vector<std::size_t> counts = {};
};

struct Outcome {
  std::vector<Values> parameters;  // by rank
  std::vector<Values> masters;
  std::vector<std::vector<StepResult>> results;  // by rank, by update
  std::vector<comm::Traffic> traffic;            // of the last update
};

inline std::vector<at::Tensor> share_of(const Training& run, const std::vector<at::Tensor>& window,
                                        int rank) {
  std::size_t begin = 0, count = window.size() / static_cast<std::size_t>(run.ranks);
  if (run.counts.empty()) {
    begin = count * static_cast<std::size_t>(rank);
  } else {
    for (int r = 0; r < rank; ++r) begin += run.counts[static_cast<std::size_t>(r)];
    count = run.counts[static_cast<std::size_t>(rank)];
  }
  const auto first = window.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

inline Outcome train(const Training& run) {
  Outcome outcome;
  const auto ranks = static_cast<std::size_t>(run.ranks);
  outcome.parameters.resize(ranks);
  outcome.masters.resize(ranks);
  outcome.results.resize(ranks);
  outcome.traffic.resize(ranks);
  const auto body = [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    const auto rank = static_cast<std::size_t>(group->rank());
    GridModel model;
    // Only rank 0's values may count.
    if (rank > 0) {
      at::NoGradGuard no_grad;
      for (auto& [name, tensor] : model.slots()) tensor->add_(static_cast<double>(rank));
    }
    Engine engine(model.view(), run.config, group);
    model.bind(engine);
    for (int update = 0; update < run.updates; ++update) {
      group->reset_traffic();
      outcome.results[rank].push_back(engine.step(
          share_of(run, run.window(update), group->rank()),
          [&](const at::Tensor& b) { return Loss::sum(model.loss_sum(b), counted(b)); }));
      outcome.traffic[rank] = group->traffic();
    }
    outcome.parameters[rank] = values_of(engine, model);
    for (auto& [name, tensor] : model.slots()) {
      outcome.masters[rank][name] = engine.master(name).clone();
    }
  };
  testing::on_ranks(run.ranks, body, {.timeout = std::chrono::seconds(60)});
  return outcome;
}

inline std::function<std::vector<at::Tensor>(int)> equal_windows(int micro_batches,
                                                                 std::int64_t rows = 2) {
  return [=](int update) {
    std::vector<at::Tensor> window;
    for (int i = 0; i < micro_batches; ++i) {
      window.push_back(make_tokens(rows + (i % 2), static_cast<std::uint64_t>(1000 * update + i)));
    }
    return window;
  };
}

}  // namespace poise::test
