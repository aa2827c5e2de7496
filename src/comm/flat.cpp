// Copies of flat tensors.
#include "comm/flat.h"

#include <cstring>

#include "core/launch.h"
#include "kernels/pack.h"

namespace poise::comm {

Overlap overlap_of(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
  if (a.nbytes() == 0 || b.nbytes() == 0) return Overlap::none;
  if (a_begin == b_begin && a.nbytes() == b.nbytes()) return Overlap::same;
  const bool apart = a_begin + a.nbytes() <= b_begin || b_begin + b.nbytes() <= a_begin;
  return apart ? Overlap::none : Overlap::partly;
}

at::Tensor piece_of(const at::Tensor& whole, int rank, int size) {
  const std::int64_t numel = whole.numel() / size;
  return whole.narrow(0, rank * numel, numel);
}

at::Tensor segment_of(const at::Tensor& whole, int rank, int size) {
  const std::int64_t begin = whole.numel() * rank / size;
  return whole.narrow(0, begin, whole.numel() * (rank + 1) / size - begin);
}

at::Tensor bytes_of(const at::Tensor& flat) { return flat.variable_data().view(at::kByte); }

void copy_flat(const at::Tensor& target, const at::Tensor& source) {
  if (target.nbytes() == 0 || overlap_of(target, source) == Overlap::same) return;
  if (target.is_cpu()) {
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
  } else {
    target.variable_data().copy_(source, /*non_blocking=*/true);
  }
}

void cast_flat(const at::Tensor& target, const at::Tensor& source) {
  if (target.scalar_type() == source.scalar_type()) return copy_flat(target, source);
  if (target.numel() == 0) return;
  const kernels::PackPiece piece{source.const_data_ptr(), target.mutable_data_ptr(),
                                 target.numel()};
  kernels::Launch launch = launch_for(target.device());
  launch.parallel_for = nullptr;  // a stream's thread must not start an OpenMP team of its own
  kernels::pack(launch, kernel_dtype(source.scalar_type()), kernel_dtype(target.scalar_type()),
                &piece, 1, 1.0f);
}

}  // namespace poise::comm
