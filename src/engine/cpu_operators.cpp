// What torch's operators take on this CPU beside their results, seen under the counting allocator.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "poise/memory.h"
#include "poise/module_plan.h"

namespace poise {
namespace {

// What mm of the two takes beside its result.
std::int64_t inside_a_product(const at::Tensor& one, const at::Tensor& other) {
  const memory::Ledger ledger;
  const memory::AccountScope scope(ledger, memory::Account::other);
  const auto result = at::mm(one, other);
  const auto books = ledger.snapshot();
  return books.peak_bytes - static_cast<std::int64_t>(result.nbytes());
}

at::Tensor matrix(std::int64_t rows, std::int64_t columns) {
  return at::zeros({rows, columns}, at::kBFloat16);
}

std::int64_t bytes_of_an_element() {
  constexpr std::int64_t few = 64, many = 256;
  constexpr auto elements = many * many - few * few;
  const at::NoGradGuard no_grad;
  const auto deep = matrix(many, few), small = matrix(few, few);
  const auto grown = inside_a_product(deep, deep.t()) - inside_a_product(small, small.t());
  return std::max<std::int64_t>(0, (grown + elements / 2) / elements);
}

// Read off products of few columns, which do not count; above the bounds nothing grows any more.
class Panels {
 public:
  explicit Panels(std::int64_t of_an_element) : of_an_element_(of_an_element) {}

  std::int64_t operator()(std::int64_t rows, std::int64_t depth, bool of_weight) {
    constexpr std::int64_t kMostRows = 2048, kDeepest = 4096, kColumns = 128;
    // Every thread has panels of its own.
    const Key key{std::min(rows, kMostRows), std::min(depth, kDeepest), of_weight,
                  at::get_num_threads()};
    const std::lock_guard lock(mutex_);
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    const auto [most, deep, transposed, threads] = key;
    const at::NoGradGuard no_grad;
    const auto one = transposed ? matrix(deep, most).t() : matrix(most, deep);
    const auto inside = inside_a_product(one, matrix(deep, kColumns));
    return known_[key] = std::max<std::int64_t>(0, inside - of_an_element_ * most * kColumns);
  }

 private:
  using Key = std::tuple<std::int64_t, std::int64_t, bool, int>;
  const std::int64_t of_an_element_;
  std::mutex mutex_;
  std::map<Key, std::int64_t> known_;
};

}  // namespace

plan::CpuOperators cpu_operators() {
  static const auto of_an_element = bytes_of_an_element();
  static Panels panels(of_an_element);
  plan::CpuOperators seen;
  seen.threads = at::get_num_threads();
  seen.bf16_product = of_an_element;
  seen.bf16_panels = [](std::int64_t rows, std::int64_t depth, bool of_weight) {
    return panels(rows, depth, of_weight);
  };
  return seen;
}

}  // namespace poise
