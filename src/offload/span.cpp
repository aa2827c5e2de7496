// What all spans do alike: checks, and transfers that are waited for.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "poise/error.h"
#include "poise/offload.h"

namespace poise::offload {
namespace {

void check_part(const Span& span, std::int64_t begin, const at::Tensor& tensor) {
  POISE_CHECK(tensor.is_contiguous() && tensor.scalar_type() == span.dtype());
  POISE_CHECK(begin >= 0 && begin + tensor.numel() <= span.numel(), begin, " + ", tensor.numel(),
              " of ", span.numel());
}

// Whether the transfer itself can take the tensor.
bool fits(const Span& span, const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.scalar_type() == span.dtype() && tensor.device().is_cpu();
}

// An interrupt ends the wait, not the transfer: the memory is not the caller's before that is over.
void finish(const Event& event) {
  try {
    event.synchronize();
  } catch (...) {
    if (!event.done()) {
      try {
        event.synchronize_on_worker();
      } catch (...) {
        // The interrupt is what is told.
      }
    }
    throw;
  }
}

// A tensor of another type or device goes by a small one of the CPU.
template <class Move>
void in_pieces(const at::Tensor& whole, at::ScalarType dtype, Move move) {
  constexpr std::int64_t kPiece = 1 << 18;
  auto piece = at::empty({std::min(kPiece, whole.numel())}, at::TensorOptions(dtype));
  for (std::int64_t at = 0; at < whole.numel(); at += kPiece) {
    const auto count = std::min(kPiece, whole.numel() - at);
    auto part = piece.narrow(0, 0, count);
    move(at, whole.narrow(0, at, count), part);
  }
}

}  // namespace

Span::~Span() = default;
Store::~Store() = default;

Event Span::fetch(std::int64_t begin, const at::Tensor& to) {
  check_part(*this, begin, to);
  return to.numel() == 0 ? Event() : do_fetch(begin, to);
}

Event Span::put(std::int64_t begin, const at::Tensor& from) {
  check_part(*this, begin, from);
  return from.numel() == 0 ? Event() : do_put(begin, from);
}

void Span::read(std::int64_t begin, const at::Tensor& to) {
  at::NoGradGuard no_grad;
  if (const auto here = tensor(); here.defined()) {
    to.copy_(here.narrow(0, begin, to.numel()).view_as(to));
  } else if (fits(*this, to)) {
    finish(fetch(begin, to));
  } else {
    POISE_CHECK(to.is_contiguous());
    in_pieces(to.view({-1}), dtype_,
              [&](std::int64_t at, const at::Tensor& part, at::Tensor& piece) {
                finish(fetch(begin + at, piece));
                part.copy_(piece);
              });
  }
}

void Span::write(std::int64_t begin, const at::Tensor& from) {
  at::NoGradGuard no_grad;
  if (const auto here = tensor(); here.defined()) {
    here.narrow(0, begin, from.numel()).copy_(from.reshape({-1}));
  } else if (fits(*this, from)) {
    finish(put(begin, from));
  } else {
    in_pieces(from.reshape({-1}), dtype_,
              [&](std::int64_t at, const at::Tensor& part, at::Tensor& piece) {
                piece.copy_(part);
                finish(put(begin + at, piece));
              });
  }
}

}  // namespace poise::offload
