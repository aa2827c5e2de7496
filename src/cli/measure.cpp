// Each measurement warms up once and takes the best of a few.
#include "cli/measure.h"

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
