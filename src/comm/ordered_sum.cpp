// Blocks that stay in the first cache: every row is read once, the target written once.
#include "comm/ordered_sum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/launch.h"
#include "kernels/accumulate.h"
#include "kernels/pack.h"

namespace poise::comm {
namespace {

constexpr std::int64_t kBlock = 4096;  // elements

const void* advanced(const void* row, std::int64_t bytes) {
  return static_cast<const char*>(row) + bytes;
}

}  // namespace

void ordered_sum(float* target, c10::ScalarType dtype, const std::vector<const void*>& rows,
                 std::int64_t numel) {
  const kernels::Launch launch;  // the calling thread: one is enough for the memory
  const kernels::DType type = kernel_dtype(dtype);
  std::array<float, kBlock> sum;  // not the target: it may be a row that is still to be added
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - begin);
    const std::int64_t offset = begin * kernels::size_of(type);
    const kernels::PackPiece first{advanced(rows[0], offset), sum.data(), count};
    kernels::pack(launch, type, kernels::DType::f32, &first, 1, 1.0f);
    for (std::size_t row = 1; row < rows.size(); ++row) {
      kernels::accumulate(launch, kernels::Accumulate::add, sum.data(), type,
                          advanced(rows[row], offset), count, 1.0f, nullptr);
    }
    std::memcpy(target + begin, sum.data(), static_cast<std::size_t>(count) * sizeof(float));
  }
}

void ordered_sum(double* target, const std::vector<const void*>& rows, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    double sum = static_cast<const double*>(rows[0])[i];
    for (std::size_t row = 1; row < rows.size(); ++row) {
      sum += static_cast<const double*>(rows[row])[i];
    }
    target[i] = sum;
  }
}

void sum_rows(const at::Tensor& target, c10::ScalarType dtype,
              const std::vector<const void*>& rows) {
  if (dtype == at::kDouble) {
    ordered_sum(target.mutable_data_ptr<double>(), rows, target.numel());
  } else {
    ordered_sum(target.mutable_data_ptr<float>(), dtype, rows, target.numel());
  }
}

}  // namespace poise::comm
