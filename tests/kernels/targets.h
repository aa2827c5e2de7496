// Where the equality tests run: each target is compared with the reference back end.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/launch.h"
#include "kernels/isa.h"

namespace poise::kernels::testing {

struct Target {
  std::string name;
  c10::Device device = c10::Device(c10::kCPU);
  Isa isa = Isa::baseline;  // CPU only
  bool threads = false;     // CPU only: odd pieces on two threads
  bool backwards = false;   // CUDA on the CPU only: the last thread runs first

  Launch launch() const;
  // What makes the target run so, while it lives.
  std::shared_ptr<void> force() const;
};

inline void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

// Defined once per test program.
std::vector<Target> targets();
// Why the target cannot run here; empty where it can.
std::string reason_to_skip();

}  // namespace poise::kernels::testing
