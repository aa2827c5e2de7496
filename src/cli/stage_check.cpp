// The built-in GPT at its smallest, three updates of two micro-batches.
#include "cli/stage_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <torch/utils.h>

#include <thread>
#include <vector>

#include "cli/byte_gpt.h"
#include "poise/engine.h"

namespace poise::cli {
namespace {

std::vector<at::Tensor> trained(const std::shared_ptr<comm::Group>& group, std::int64_t stage) {
  config::ModelPolicy policy;
  policy.layers = 2;
  policy.width = 16;
  policy.heads = 2;
  policy.sequence_length = 8;
  auto model = std::make_shared<ByteGpt>(policy, /*seed=*/1);
  model->to(group->device());
  Config config;
  config.zero.stage = stage;
  config.optimizer.lr = 1e-2;
  Engine engine(view(*model), config, group);
  model->bind(engine);
  for (std::int64_t update = 0; update < 3; ++update) {
    engine.step(2, [&](std::size_t micro_batch) {
      const auto first = 31 * update + 7 * static_cast<std::int64_t>(micro_batch) + group->rank();
      const auto bytes = at::arange(first, first + 18, at::kLong).remainder(256).view({2, 9});
      const auto on_device = bytes.to(group->device());
      return model->loss(
          {on_device.narrow(1, 0, 8).contiguous(), on_device.narrow(1, 1, 8).contiguous()});
    });
  }
  const auto whole = engine.gathered();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const auto& parameter : model->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace

StageCheck check_stages(const std::shared_ptr<comm::Group>& group) {
  std::vector<std::vector<at::Tensor>> by_stage;
  for (std::int64_t stage = 0; stage <= 3; ++stage) by_stage.push_back(trained(group, stage));
  const bool once = equal(by_stage[0], by_stage[1]), every = equal(by_stage[2], by_stage[3]);
  const auto text = [](bool same) { return same ? "the same bits" : "DIFFERENT bits"; };
  return {once && every,
          join("ZeRO stages 0 and 1 train to ", text(once), ", 2 and 3 to ", text(every))};
}

StageCheck check_stages_in_threads() {
  auto groups = comm::threads(2, {.timeout = std::chrono::seconds(30)});
  std::vector<StageCheck> results(groups.size());
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < groups.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        results[rank] = check_stages(groups[rank]);
      } catch (const std::exception& error) {
        results[rank] = {false, error.what()};
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  return results[0].same ? results[1] : results[0];
}

}  // namespace poise::cli
