// Stands in for cuda/ where CUDA was not compiled: same functions, one clear error.
#include "kernels/backends.h"
#include "poise/error.h"

namespace poise::kernels::cuda {
namespace {

[[noreturn]] void refuse(const char* kernel) {
  fail("kernels", "this build has no CUDA kernels: ", kernel,
       " on a CUDA tensor; build with -DPOISE_CUDA=ON (needs nvcc and a CUDA torch) or keep the "
       "model on the CPU");
}

}  // namespace

void squared_norms(const Launch&, DType, const void*, const Piece*, std::int64_t, double*) {
  refuse("squared_norms");
}

void accumulate(const Launch&, Accumulate, float*, DType, const void*, std::int64_t, float,
                double*) {
  refuse("accumulate");
}

void adamw(const Launch&, const AdamArrays&, const AdamSegment*, std::int64_t,
           const AdamSettings&) {
  refuse("adamw");
}

void sgd(const Launch&, const SgdArrays&, const SgdSegment*, std::int64_t, const SgdSettings&) {
  refuse("sgd");
}

void pack(const Launch&, DType, DType, const PackPiece*, std::int64_t, float) { refuse("pack"); }

}  // namespace poise::kernels::cuda
