// The door to a unit: a callable runs in it, or a caller with hooks of its own enters and leaves.
#include "poise/zero.h"

#include "zero/units.h"

namespace poise::zero {

at::Tensor Unit::operator()(const std::function<at::Tensor(const at::Tensor&)>& forward,
                            const at::Tensor& input) const {
  return (*this)([&](const Tensors& inputs) { return Tensors{forward(inputs.front())}; },
                 Tensors{input})
      .front();
}

Unit::Tensors Unit::operator()(const std::function<Tensors(const Tensors&)>& forward,
                               const Tensors& inputs) const {
  if (units_.expired()) return forward(inputs);
  Tensors outputs;
  const auto entered = enter(inputs);
  try {
    outputs = forward(entered);
  } catch (...) {
    abandon();
    throw;
  }
  leave(outputs);
  return outputs;
}

Unit::Tensors Unit::enter(const Tensors& inputs) const {
  const auto units = units_.lock();
  return units ? units->enter(index_, inputs) : inputs;
}

void Unit::leave(const Tensors& outputs) const {
  if (const auto units = units_.lock()) units->leave(index_, outputs);
}

void Unit::abandon() const noexcept {
  if (const auto units = units_.lock()) units->abandon(index_);
}

}  // namespace poise::zero
