// What torch's operators take on this CPU beside their results, seen under the counting allocator.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>

#include "poise/memory.h"
#include "poise/module_plan.h"

namespace poise {
namespace {

std::int64_t inside_a_bf16_product() {
  constexpr std::int64_t kRows = 64, kElements = kRows * kRows;
  const at::NoGradGuard no_grad;
  const memory::Ledger ledger;
  const auto matrix = at::zeros({kRows, kRows}, at::kBFloat16);
  const memory::AccountScope scope(ledger, memory::Account::other);
  const auto result = at::mm(matrix, matrix.t());
  const auto books = ledger.snapshot();
  return (books.peak_bytes - static_cast<std::int64_t>(result.nbytes())) / kElements;
}

}  // namespace

plan::CpuOperators cpu_operators() {
  static const auto inside = inside_a_bf16_product();
  return {.threads = at::get_num_threads(), .bf16_product = inside};
}

}  // namespace poise
