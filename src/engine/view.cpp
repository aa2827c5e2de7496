// The ModelView of a torch::nn module.
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "poise/engine.h"

namespace poise {
namespace {

bool is_long_list(const torch::nn::Module& module) {
  return (module.as<torch::nn::ModuleList>() || module.as<torch::nn::Sequential>()) &&
         module.children().size() >= 2;
}

bool is_list_of_one(const torch::nn::Module& module) {
  return module.as<torch::nn::ModuleList>() && module.children().size() == 1;
}

bool of_one_class(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  const torch::nn::Module& first = *modules[0];
  return std::all_of(modules.begin(), modules.end(), [&](const auto& module) {
    const torch::nn::Module& other = *module;
    return typeid(other) == typeid(first);
  });
}

// Elements of its parameters, a tied one counted once.
std::int64_t numel_of(const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::int64_t numel = 0;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) numel += parameter.numel();
  }
  return numel;
}

// The path of the list of repeated blocks: of the ModuleLists and Sequentials (the module itself
// may be one) the one that holds most parameters, those of one class before mixed ones, the first
// of equals; a ModuleList with one entry (a model cut down to one layer) where there is no longer
// list. model_view.find_units of the Python package has the same rule. nullopt: there is none.
std::optional<std::string> path_of_blocks(const torch::nn::Module& module) {
  std::optional<std::string> best;
  std::tuple<bool, bool, std::int64_t> best_rank{false, false, 0};
  const auto consider = [&](const std::string& path, const torch::nn::Module& candidate) {
    const bool is_long = is_long_list(candidate);
    if (!is_long && !is_list_of_one(candidate)) return;
    const auto numel = numel_of(candidate);
    const std::tuple rank{is_long, of_one_class(candidate.children()), numel};
    if (numel == 0 || rank <= best_rank) return;
    best_rank = rank;
    best = path;
  };
  consider("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    consider(item.key(), *item.value());
  }
  return best;
}

}  // namespace

ModelView view(const torch::nn::Module& module) {
  ModelView view;
  const auto blocks = path_of_blocks(module);
  const std::string prefix = !blocks || blocks->empty() ? "" : *blocks + ".";
  for (const auto& item : module.named_parameters()) {
    view.parameters.push_back({item.key(), item.value()});
    if (!blocks || item.key().rfind(prefix, 0) != 0) continue;
    // "blocks.3.fc.weight" belongs to unit "blocks.3".
    const auto end = item.key().find('.', prefix.size());
    const auto unit = item.key().substr(0, end);
    if (view.units.empty() || view.units.back().name != unit) view.units.push_back({unit, {}});
    view.units.back().parameters.push_back(item.key());
  }
  for (const auto& item : module.named_buffers())
    view.buffers.push_back({item.key(), item.value()});
  return view;
}

}  // namespace poise
