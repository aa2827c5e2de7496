// Each measurement warms up once and takes the best of a few.
#include "cli/measure.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>

#include "cli/byte_gpt.h"
#include "poise/error.h"
#include "poise/offload.h"
#include "poise/plan.h"

namespace poise::cli {
namespace {

template <class Call>
double best_seconds(Call&& call) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int i = 0; i < 4; ++i) {
    const auto begin = Clock::now();
    call();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (i > 0) best = std::min(best, seconds);
  }
  return best;
}

// Work of a GPU goes on behind the call that starts it.
void finish(c10::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

}  // namespace

double copy_rate(int threads) {
  const int before = at::get_num_threads();
  at::set_num_threads(threads);
  constexpr std::int64_t numel = std::int64_t{64} << 20;  // 256 MiB, past most caches
  const auto from = at::zeros({numel}, at::kFloat);
  const auto to = at::zeros({numel}, at::kFloat);
  const double seconds = best_seconds([&] { to.copy_(from); });
  at::set_num_threads(before);
  return 2.0 * 4 * numel / seconds / 1e9;
}

double product_seconds(c10::ScalarType dtype) {
  const auto a = at::zeros({512, 512}, at::TensorOptions().dtype(dtype));
  return best_seconds([&] { at::linear(a, a); });
}

namespace {

// Seconds over FLOPs of training: a line's slope and, for one link of the chain, its start.
struct Line {
  double slope = 0, overhead = 0;
};

// Each point is weighed by its inverse, so that relative errors count.
Line training_line(const config::ModelPolicy& policy, const at::TensorOptions& options) {
  ByteGpt model(policy, 1);
  model.to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  const auto flops = 3 * plan::forward_flops(plan::byte_gpt(policy), policy.sequence_length);
  double w = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const std::int64_t rows : {1, 2, 4, 8}) {
    const auto bytes = at::zeros({rows, policy.sequence_length}, options.dtype(at::kLong));
    const double seconds = best_seconds([&] {
      model.forward(bytes).sum().backward();
      finish(options.device());
    });
    const double work = flops * static_cast<double>(rows), weight = 1 / (seconds * seconds);
    w += weight;
    x += weight * work;
    y += weight * seconds;
    xx += weight * work * work;
    xy += weight * work * seconds;
  }
  const double slope = (w * xy - x * y) / (w * xx - x * x);
  return {slope, std::max(0.0, (y - slope * x) / w) / static_cast<double>(policy.layers + 2)};
}

config::ModelPolicy transformer(std::int64_t width, std::int64_t sequence_length) {
  config::ModelPolicy policy;
  policy.layers = 4;
  policy.width = width;
  policy.heads = width / 64;
  policy.sequence_length = sequence_length;
  return policy;
}

const c10::Device kGpu(c10::kCUDA, 0);

// Bytes a second of a copy of 256 MiB.
double rate_of_copy(const at::Tensor& to, const at::Tensor& from, c10::Device waits_for) {
  const double seconds = best_seconds([&] {
    to.copy_(from, /*non_blocking=*/true);
    finish(waits_for);
  });
  return static_cast<double>(from.nbytes()) / seconds;
}

constexpr std::int64_t kCopied = std::int64_t{64} << 20;  // floats, past all caches

}  // namespace

DeviceRates measure_cpu() {
  const auto line = training_line(transformer(256, 256), at::TensorOptions(at::kFloat));
  DeviceRates rates;
  rates.float_flops = 1 / line.slope;
  rates.overhead = line.overhead;
  rates.half_flops =
      rates.float_flops * product_seconds(at::kFloat) / product_seconds(at::kBFloat16);
  rates.memory_rate = 1e9 * copy_rate(at::get_num_threads());
  return rates;
}

DeviceRates measure_gpu() {
  if (at::getNumGPUs() == 0) fail("cli", "torch sees no GPU on this machine");
  // Wide enough that matrices fill the device. fp16, whose rate is that of bf16 and which older
  // devices have, too.
  const auto policy = transformer(2048, 1024);
  const auto on = at::TensorOptions().device(kGpu);
  const auto half = training_line(policy, on.dtype(at::kHalf));
  DeviceRates rates;
  rates.half_flops = 1 / half.slope;
  rates.float_flops = 1 / training_line(policy, on.dtype(at::kFloat)).slope;
  rates.overhead = half.overhead;
  rates.memory_rate = gpu_copy_rate();
  return rates;
}

double gpu_copy_rate() {
  const at::TensorOptions on(kGpu);
  return 2 * rate_of_copy(at::zeros({kCopied}, on), at::zeros({kCopied}, on), kGpu);
}

double host_rate() {
  const auto pinned = at::zeros({kCopied}, at::TensorOptions(at::kFloat).pinned_memory(true));
  return rate_of_copy(at::zeros({kCopied}, at::TensorOptions(kGpu)), pinned, kGpu);
}

double peer_rate() {
  if (at::getNumGPUs() < 2) return 0;
  const c10::Device other(c10::kCUDA, 1);
  const auto from = at::zeros({kCopied}, at::TensorOptions(kGpu));
  return rate_of_copy(at::zeros({kCopied}, at::TensorOptions(other)), from, other);
}

std::int64_t gpu_memory() {
  return static_cast<std::int64_t>(c10::getDeviceAllocator(c10::kCUDA)->getMemoryInfo(0).second);
}

double file_rate(const std::string& folder) {
  config::OffloadPolicy policy;
  policy.directory = folder;
  const auto memory = std::make_shared<offload::HostMemory>(c10::Device(c10::kCPU), 0);
  const auto values = at::zeros({kCopied / 2}, at::kFloat);
  const auto span = offload::file_store(policy, memory)->reserve(values.numel(), at::kFloat);
  const double seconds = best_seconds([&] {
    span->put(0, values).synchronize();
    span->fetch(0, values).synchronize();
  });
  return 2 * static_cast<double>(values.nbytes()) / seconds;
}

GroupRates group_rates(comm::Group& group) {
  const std::int64_t shard = (std::int64_t{4} << 20) / group.size();
  const auto options = at::TensorOptions().dtype(at::kFloat).device(group.device());
  const auto whole = at::zeros({shard * group.size()}, options);
  const auto mine = at::zeros({shard}, options);
  group.reserve(static_cast<std::int64_t>(whole.nbytes()));
  const auto rate = [&](double seconds) {
    return static_cast<double>(whole.nbytes()) / seconds / 1e9;
  };
  GroupRates rates;
  rates.reduce_scatter =
      rate(best_seconds([&] { group.reduce_scatter(mine, whole, "bandwidth").synchronize(); }));
  rates.all_gather =
      rate(best_seconds([&] { group.all_gather(whole, mine, "bandwidth").synchronize(); }));
  return rates;
}

std::string io_uring() {
  std::array<char, 256> parameters{};  // larger than the kernel's struct, all zero: the defaults
  const auto descriptor = syscall(SYS_io_uring_setup, 1, parameters.data());
  if (descriptor < 0) return std::string("refused: ") + std::strerror(errno);
  close(static_cast<int>(descriptor));
  return "works";
}

}  // namespace poise::cli
