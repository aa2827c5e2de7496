// `poise doctor`: versions, instruction sets, GPUs and threads, one a line.
#include "cli/doctor.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <thread>

#include "kernels/isa.h"
#include "poise/version.h"

namespace poise::cli {

const char* version_line() { return "poise " POISE_VERSION " (torch " POISE_TORCH_VERSION ")"; }

void doctor(std::ostream& out) {
  out << "poise          " << POISE_VERSION << ", built against torch " << TORCH_VERSION << '\n';
  out << "kernels        " << kernels::name_of(kernels::active_isa()) << " (this CPU:";
  for (const auto isa : kernels::available_isas()) out << ' ' << kernels::name_of(isa);
  out << ")\n";
  out << "torch kernels  " << at::get_cpu_capability() << '\n';
  const auto devices = at::hasCUDA() ? at::getNumGPUs() : 0;
  out << "CUDA           "
      << (at::hasCUDA() ? "in torch, devices: " + std::to_string(devices)
                        : "not in this torch, or no driver")
      << '\n';
  out << "threads        " << at::get_num_threads() << " of torch, "
      << std::thread::hardware_concurrency() << " hardware\n";
}

}  // namespace poise::cli
