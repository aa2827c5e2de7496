// The ModelView of a torch::nn module.
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "poise/engine.h"

namespace poise {
namespace {

// The path of the list of repeated blocks: the ModuleList or Sequential that holds most parameters.
std::string path_of_blocks(const torch::nn::Module& module) {
  std::string best;
  std::int64_t most = 0;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const auto& child = item.value();
    if (!child->as<torch::nn::ModuleList>() && !child->as<torch::nn::Sequential>()) continue;
    if (child->children().size() < 2) continue;
    std::int64_t numel = 0;
    for (const auto& parameter : child->parameters()) numel += parameter.numel();
    if (numel > most) {
      most = numel;
      best = item.key();
    }
  }
  return best;
}

}  // namespace

ModelView view(const torch::nn::Module& module) {
  ModelView view;
  const auto blocks = path_of_blocks(module);
  for (const auto& item : module.named_parameters()) {
    view.parameters.push_back({item.key(), item.value()});
    if (blocks.empty() || item.key().rfind(blocks + ".", 0) != 0) continue;
    // "blocks.3.fc.weight" belongs to unit "blocks.3".
    const auto end = item.key().find('.', blocks.size() + 1);
    const auto unit = item.key().substr(0, end);
    if (view.units.empty() || view.units.back().name != unit) view.units.push_back({unit, {}});
    view.units.back().parameters.push_back(item.key());
  }
  for (const auto& item : module.named_buffers())
    view.buffers.push_back({item.key(), item.value()});
  return view;
}

}  // namespace poise
