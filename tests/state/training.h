// Trainings of the grid model that save and load, on ranks that are threads.
#pragma once

#include <ATen/Parallel.h>

#include <functional>
#include <string>
#include <vector>

#include "poise/engine.h"
#include "state/saved.h"
#include "support/grid_model.h"
#include "support/ranks.h"
#include "support/temp_folder.h"

namespace poise::test {

inline Config adamw_config(int stage = 0) {
  Config config;
  config.optimizer.lr = 1e-2;
  config.optimizer.weight_decay = 0.1;
  config.optimizer.max_grad_norm = 0.5;
  config.schedule.type = "cosine";
  config.schedule.warmup_updates = 2;
  config.schedule.total_updates = 40;
  config.zero.stage = stage;
  config.comm.timeout_seconds = 60;
  return config;
}

// What a rank has done and holds.
struct Held {
  std::vector<StepResult> results;
  Values parameters;
  Values masters;
};

struct Part {
  int ranks = 1;
  Config config;
  std::string load = {};       // before the first update
  std::string save = {};       // after the last one, into this directory
  int begin = 0, end = 0;      // updates
  std::int64_t smallest = 12;  // micro-batches of an update, of all ranks together
};

// Rank r takes the r-th contiguous block of an update's micro-batches.
inline std::vector<at::Tensor> window_of(const Part& part, int update, int rank) {
  std::vector<at::Tensor> window;
  const auto each = part.smallest / part.ranks;
  for (auto i = each * rank; i < each * (rank + 1); ++i) {
    window.push_back(make_tokens(2 + i % 2, static_cast<std::uint64_t>(1000 * update + i)));
  }
  return window;
}

inline std::vector<Held> run(const Part& part) {
  std::vector<Held> held(static_cast<std::size_t>(part.ranks));
  testing::on_ranks(part.ranks,
                    [&](std::shared_ptr<comm::Group> group) {
                      at::set_num_threads(1);
                      auto& mine = held[static_cast<std::size_t>(group->rank())];
                      GridModel model;
                      Engine engine(model.view(), part.config, group);
                      model.bind(engine);
                      if (!part.load.empty()) engine.load(part.load);
                      for (int update = part.begin; update < part.end; ++update) {
                        mine.results.push_back(engine.step(
                            window_of(part, update, group->rank()), [&](const at::Tensor& b) {
                              return Loss::sum(model.loss_sum(b), counted(b));
                            }));
                      }
                      mine.parameters = values_of(engine, model);
                      for (auto& [name, tensor] : model.slots())
                        mine.masters[name] = engine.master(name).clone();
                      if (!part.save.empty()) engine.save(part.save);
                    },
                    {.timeout = std::chrono::seconds(60)});
  return held;
}

// What the results of the same updates must share to the bit; empty where they do.
inline std::string first_difference(const std::vector<StepResult>& a,
                                    const std::vector<StepResult>& b) {
  if (a.size() != b.size()) return join(a.size(), " and ", b.size(), " updates");
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto differs = [&](const char* what, auto x, auto y) {
      const bool same = x == y || (x != x && y != y);  // NaN is NaN
      return same ? std::string() : join(what, " of update ", i, ": ", x, " and ", y);
    };
    for (const auto& text :
         {differs("status", name_of(a[i].status), name_of(b[i].status)),
          differs("loss", a[i].loss, b[i].loss), differs("norm", a[i].grad_norm, b[i].grad_norm),
          differs("lr", a[i].lr, b[i].lr), differs("scale", a[i].loss_scale, b[i].loss_scale),
          differs("updates", a[i].updates, b[i].updates),
          differs("skipped", a[i].skipped, b[i].skipped)}) {
      if (!text.empty()) return text;
    }
  }
  return "";
}

// The first thing in which two saves differ, read element by element; empty where there is none.
// `kept`: what the second one keeps frozen parameters in.
inline std::string first_difference(const state::Saved& a, const state::Saved& b,
                                    at::ScalarType kept = at::kFloat) {
  for (const auto& parameter : a.manifest().parameters) {
    const auto* other = b.parameter(parameter.name);
    if (!other) return parameter.name;
    std::vector<std::pair<std::string, std::int64_t>> kinds{
        {parameter.trainable ? state::kMaster : state::kValue, parameter.numel()}};
    const auto& moments = a.manifest().moments;
    for (std::size_t i = 0; parameter.trainable && i < moments.size(); ++i) {
      kinds.emplace_back(state::moment(static_cast<std::int64_t>(i)), moments[i].numel(parameter));
    }
    for (const auto& [kind, numel] : kinds) {
      const auto read = [&, &kind = kind, numel = numel](const state::Saved& saved,
                                                         const state::SavedParameter& p) {
        auto values = at::zeros({numel}, at::kFloat);
        saved.read(kind, p, 0, parameter.order, values);
        return kind == state::kValue ? values.to(kept) : values;
      };
      if (!at::equal(read(a, parameter), read(b, *other))) return kind + " of " + parameter.name;
    }
  }
  return "";
}

}  // namespace poise::test
