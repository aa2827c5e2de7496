// Asks torch with tensors of the shape.
#include "cli/attention.h"

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>

namespace poise::cli {

std::string attention_kernel(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device,
                             double dropout) {
  const auto q = at::empty(sizes, at::TensorOptions(dtype).device(device)).requires_grad_();
  const char* names[] = {"math", "flash", "efficient", "cudnn"};
  const auto choice = at::_fused_sdp_choice(q, q, q, {}, dropout, /*is_causal=*/true);
  return choice >= 0 && choice < 4 ? names[choice] : std::to_string(choice);
}

}  // namespace poise::cli
