// What happens to a batch between the source and the model: cast and page-locked copies.
#include <ATen/Context.h>

#include "poise/data.h"

namespace poise::data {

at::Tensor cast_inputs(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!at::isFloatingType(dtype)) {
    fail("data", "inputs cast to ", c10::toString(dtype), "; give a floating type");
  }
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype) : tensor;
}

Batch cast_inputs(const Batch& batch, at::ScalarType dtype) {
  return {cast_inputs(batch.inputs, dtype), batch.targets};
}

at::Tensor pinned(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !at::hasCUDA()) return tensor;
  return tensor.pin_memory();
}

}  // namespace poise::data
