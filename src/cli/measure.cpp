// Each measurement warms up once and takes the best of a few.
#include "cli/measure.h"

#include "cli/byte_gpt.h"
#include "poise/plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

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

CpuRates measure_cpu() {
  config::ModelPolicy policy;
  policy.layers = 4;
  policy.width = 256;
  policy.heads = 4;
  policy.sequence_length = 256;
  ByteGpt model(policy, 1);
  const auto flops = 3 * plan::forward_flops(plan::byte_gpt(policy), policy.sequence_length);
  // A line through seconds over FLOPs, each point weighed by its inverse: relative errors count.
  double w = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const std::int64_t rows : {1, 2, 4, 8}) {
    const auto bytes = at::zeros({rows, policy.sequence_length}, at::kLong);
    const double seconds = best_seconds([&] { model.forward(bytes).sum().backward(); });
    const double work = flops * static_cast<double>(rows), weight = 1 / (seconds * seconds);
    w += weight;
    x += weight * work;
    y += weight * seconds;
    xx += weight * work * work;
    xy += weight * work * seconds;
  }
  const double slope = (w * xy - x * y) / (w * xx - x * x);
  CpuRates rates;
  rates.float_flops = 1 / slope;
  rates.overhead = std::max(0.0, (y - slope * x) / w) / static_cast<double>(policy.layers + 2);
  rates.half_flops =
      rates.float_flops * product_seconds(at::kFloat) / product_seconds(at::kBFloat16);
  rates.memory_rate = 1e9 * copy_rate(at::get_num_threads());
  return rates;
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
