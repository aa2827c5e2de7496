// `poise doctor`: what this machine and this build are, what they reach, and what that means.
#include "cli/doctor.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <cstdio>
#include <sstream>
#include <thread>

#include "cli/attention.h"
#include "cli/measure.h"
#include "cli/stage_check.h"
#include "kernels/isa.h"
#include "poise/comm.h"
#include "poise/error.h"
#include "poise/version.h"

namespace poise::cli {
namespace {

constexpr std::chrono::seconds kTimeout{60};
constexpr double kSlow = 3;  // times slower than fp32: not worth it for speed

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

void line(std::ostream& out, const char* name, const std::string& text) {
  out << format("%-15s", name) << text << std::endl;
}

void versions(std::ostream& out) {
  line(out, "poise", join(POISE_VERSION, ", built against torch ", TORCH_VERSION));
  std::ostringstream isas;
  for (const auto isa : kernels::available_isas()) isas << ' ' << kernels::name_of(isa);
  line(out, "CPU kernels",
       join(kernels::name_of(kernels::active_isa()), " by poise (this CPU can run", isas.str(),
            "), ", at::get_cpu_capability(), " by torch"));
  line(out, "CUDA",
       at::hasCUDA() ? join("GPUs that torch sees: ", at::getNumGPUs())
                     : std::string("no GPU: this torch is without CUDA, or there is no driver"));
  line(out, "threads",
       join(at::get_num_threads(), " that torch uses, of ", std::thread::hardware_concurrency(),
            " in this machine"));
  const auto uring = io_uring();
  line(out, "io_uring",
       join(uring, uring == "works" ? "; offload to files goes by it"
                                    : "; offload to files goes by threads, which is slower"));
}

std::string cudnn() {
  if (!at::hasCUDA() || !at::Context::hasCuDNN()) return "none; only GPUs have a use for it";
  const auto version = at::Context::versionRuntimeCuDNN();
  return join(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

// What others made that poise runs on.
void back_ends(std::ostream& out, c10::Device device) {
  std::string kernels;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    kernels = join(kernels, kernels.empty() ? "" : ", ",
                   attention_kernel({1, 8, 128, 64}, dtype, device), " in ",
                   dtype == at::kFloat      ? "fp32"
                   : dtype == at::kBFloat16 ? "bf16"
                                            : "fp16");
  }
  line(out, "attention", join("torch's kernel is ", kernels));
  line(out, "cuDNN", cudnn());
  const auto nccl = comm::nccl_version();
  line(out, "transports",
       nccl.empty() ? std::string("gloo between CPUs; no NCCL, as this build is without CUDA")
                    : join("gloo between CPUs, NCCL ", nccl, " between GPUs"));
}

void first_gpu(std::ostream& out) {
  line(out, "GPU",
       format("the first has %.1f GiB; copies %.0f GB/s, from pinned memory of the host %.1f GB/s",
              static_cast<double>(gpu_memory()) / (1 << 30), gpu_copy_rate() / 1e9,
              host_rate() / 1e9));
}

// 16-bit matrices, and what to do about them.
void matrices(std::ostream& out) {
  const double fp32 = product_seconds(at::kFloat);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const double ratio = product_seconds(dtype) / fp32;
    const auto text =
        ratio > kSlow ? format("%.1f times slower than in fp32: saves memory here, not time", ratio)
        : ratio > 1   ? format("%.1f times slower than in fp32", ratio)
                      : format("%.1f times faster than in fp32", 1 / ratio);
    line(out, dtype == at::kHalf ? "fp16" : "bf16", "matrix products are " + text);
  }
}

void ranks(std::ostream& out, const std::shared_ptr<comm::Group>& group) {
  if (group->size() == 1) {
    line(out, "ranks",
         "1 process; started on several by torchrun, srun or mpirun, doctor measures their links");
    const auto check = check_stages_in_threads();
    line(out, "self-test", check.text + " (two ranks, as threads)");
    if (!check.same) fail("cli", "the self-test of the stages failed: ", check.text);
    return;
  }
  line(out, "ranks",
       join(group->size(), " processes over ", group->backend(), ", tensors on ",
            group->device().str()));
  const auto rates = group_rates(*group);
  line(out, "collectives",
       format("of 16 MiB: reduce-scatter %.2f GB/s, all-gather %.2f GB/s", rates.reduce_scatter,
              rates.all_gather));
  const auto check = check_stages(group);
  line(out, "self-test", check.text);
  // NCCL may add in another order at another size: bits are promised on CPU groups only.
  if (!check.same && group->device().is_cpu()) {
    fail("cli", "the self-test of the stages failed: ", check.text);
  }
}

}  // namespace

const char* version_line() { return "poise " POISE_VERSION " (torch " POISE_TORCH_VERSION ")"; }

void doctor(std::ostream& out) {
  const auto group = comm::from_environment({.timeout = kTimeout});
  std::ostringstream nowhere;
  auto& text = group->rank() == 0 ? out : nowhere;
  versions(text);
  back_ends(text, group->device());
  line(text, "memory",
       format("copies %.1f GB/s with 1 thread, %.1f GB/s with %d", copy_rate(1),
              copy_rate(at::get_num_threads()), at::get_num_threads()));
  if (!group->device().is_cpu() && group->rank() == 0) first_gpu(text);
  if (group->device().is_cpu()) matrices(text);
  ranks(text, group);
}

}  // namespace poise::cli
