// A stack of square weights, each a unit of its own: layers.0, layers.1, ...
#pragma once

#include "poise/error.h"
#include "support/tiny_model.h"

namespace poise::test {

inline std::vector<at::Tensor> square_layers(int count, std::int64_t width, std::uint64_t seed,
                                             double std) {
  std::vector<at::Tensor> weights;
  for (int i = 0; i < count; ++i) {
    weights.push_back(normal({width, width}, seed + static_cast<std::uint64_t>(i), std));
    weights.back().requires_grad_();
  }
  return weights;
}

inline ModelView view_of_layers(const std::vector<at::Tensor>& weights) {
  ModelView made;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto name = join("layers.", i);
    made.parameters.push_back({name, weights[i]});
    made.units.push_back({name, {name}});
  }
  return made;
}

}  // namespace poise::test
