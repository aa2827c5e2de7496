// Sharded parameters (stage 3) for models without module hooks: a Unit runs a block while its
// parameters are whole. (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "poise/export.h"

namespace poise::zero {

class Units;

// One unit of an engine, by engine.unit(name). Copies are the same unit. Unbound, after its engine
// is gone, or where parameters are not sharded, it just runs what it is given. Parameters in no
// unit are whole during the engine's forward and backward.
//
// Every rank must run every unit, in the same order. `forward` must use the unit's parameters only
// inside the call, and its inputs as arguments: those that need gradients mark where the unit's
// backward ends. Double backward through a unit is not possible; an in-place operation on an input
// as the unit's first is refused by torch.
class POISE_API Unit {
 public:
  using Tensors = std::vector<at::Tensor>;

  Unit() = default;
  Unit(std::weak_ptr<Units> units, int index) : units_(std::move(units)), index_(index) {}

  at::Tensor operator()(const std::function<at::Tensor(const at::Tensor&)>& forward,
                        const at::Tensor& input) const;
  Tensors operator()(const std::function<Tensors(const Tensors&)>& forward,
                     const Tensors& inputs) const;

  // The same in parts, for callers that have hooks of their own: forward runs on what enter() gives
  // back and ends in leave(), or in abandon() where it threw.
  Tensors enter(const Tensors& inputs) const;
  void leave(const Tensors& outputs) const;
  void abandon() const noexcept;

 private:
  std::weak_ptr<Units> units_;
  int index_ = -1;
};

// A tensor like another one on `device`, without memory: what reads or writes it throws `message`.
// Its storage says it holds the bytes that `like` needs; set_data gives it some.
POISE_API at::Tensor without_memory(const at::Tensor& like, c10::Device device,
                                    const std::string& message);

}  // namespace poise::zero
