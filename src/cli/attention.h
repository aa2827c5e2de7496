// Which of torch's kernels attention runs on.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace poise::cli {

// What torch takes for causal attention of queries, keys and values of these sizes (batch, heads,
// tokens, width of a head) with gradients: "math", "flash", "efficient" or "cudnn".
std::string attention_kernel(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device,
                             double dropout = 0);

}  // namespace poise::cli
