// Checks of shapes, dtypes, devices and overlap.
#include "comm/checks.h"

#include <c10/core/ScalarType.h>

#include "comm/flat.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

std::string of(const Call& call) { return join(name_of(call.kind), " of '", call.what, "'"); }

}  // namespace

void check_flat(const Call& call, const char* role, const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) fail("comm", of(call), ": ", role, " is no tensor; allocate it first");
  if (tensor.dim() != 1 || !tensor.is_contiguous()) {
    fail("comm", of(call), ": ", role, " must be contiguous and 1-D, got sizes ", tensor.sizes(),
         " with strides ", tensor.strides(), "; pass a flat");
  }
  const bool any_index = !device.has_index() && tensor.device().type() == device.type();
  if (tensor.device() != device && !any_index) {
    fail("comm", of(call), ": ", role, " is on ", tensor.device().str(), ", the group on ",
         device.str(), "; move one of them");
  }
}

void check_pieces(const Call& call, const at::Tensor& whole, const at::Tensor& mine, int rank,
                  int size) {
  if (whole.numel() != mine.numel() * size) {
    fail("comm", of(call), ": the whole has ", whole.numel(), " elements, a piece ", mine.numel(),
         ", the group ", size, " ranks; the whole must be that many pieces");
  }
  if (call.kind == Kind::all_gather && whole.scalar_type() != mine.scalar_type()) {
    fail("comm", of(call), ": the whole is ", c10::toString(whole.scalar_type()), ", the piece ",
         c10::toString(mine.scalar_type()), "; use one dtype");
  }
  if (overlap_of(whole, mine) != Overlap::none &&
      overlap_of(piece_of(whole, rank, size), mine) != Overlap::same) {
    fail("comm", of(call), ": the piece shares memory with the whole but is not piece ", rank,
         " of it; pass that piece or memory of its own");
  }
}

void check_reducible(const Call& call, const at::Tensor& mine, const at::Tensor& whole) {
  const auto type = whole.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) {
    fail("comm", of(call), ": cannot sum ", c10::toString(type),
         "; use float32, bfloat16 or float16");
  }
  if (mine.scalar_type() != at::kFloat) {
    fail("comm", of(call), ": the sum is float32, got ", c10::toString(mine.scalar_type()),
         " to write it to; pass a float32 tensor");
  }
}

void check_summable(const Call& call, const at::Tensor& values) {
  const auto type = values.scalar_type();
  if (type != at::kFloat && type != at::kDouble) {
    fail("comm", of(call), ": cannot sum ", c10::toString(type), "; use float32 or float64");
  }
}

void check_exchange(const Call& call, const at::Tensor& received, const at::Tensor& sent,
                    int size) {
  if (received.numel() != sent.numel() || received.scalar_type() != sent.scalar_type()) {
    fail("comm", of(call), ": receives ", received.numel(), " of ",
         c10::toString(received.scalar_type()), ", sends ", sent.numel(), " of ",
         c10::toString(sent.scalar_type()), "; both must be alike");
  }
  if (sent.numel() % size != 0) {
    fail("comm", of(call), ": ", sent.numel(), " elements are not ", size,
         " equal pieces; pad them");
  }
  if (overlap_of(received, sent) != Overlap::none) {
    fail("comm", of(call), ": receives into the memory it sends; use two tensors");
  }
}

}  // namespace poise::comm
