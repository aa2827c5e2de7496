// The first GPU, where this build and this machine have one.
#include <ATen/Context.h>

#include "kernels/targets.h"

namespace poise::kernels::testing {

Launch Target::launch() const { return launch_for(device); }

std::shared_ptr<void> Target::force() const { return nullptr; }

std::vector<Target> targets() { return {{"cuda", c10::Device(c10::kCUDA, 0)}}; }

std::string reason_to_skip() {
  return at::hasCUDA() ? "" : "no CUDA device on this machine (or a build without CUDA)";
}

}  // namespace poise::kernels::testing
