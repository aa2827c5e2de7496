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

DeviceScope::DeviceScope(int) {}
DeviceScope::~DeviceScope() = default;

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

void adamw_bf16(const Launch&, const AdamBf16Arrays&, const RoundedSegment*, std::int64_t,
                const AdamSettings&) {
  refuse("adamw_bf16");
}

void adamw_8bit(const Launch&, const Adam8BitArrays&, const RoundedSegment*, std::int64_t,
                const AdamSettings&) {
  refuse("adamw_8bit");
}

void factor_sums(const Launch&, const FactoredArrays&, const FactoredSegment*, std::int64_t, double,
                 double*) {
  refuse("factor_sums");
}

void factored_squares(const Launch&, const FactoredArrays&, const FactoredSegment*, std::int64_t,
                      double, double*) {
  refuse("factored_squares");
}

void adafactor(const Launch&, const FactoredArrays&, const FactoredSegment*, std::int64_t, double) {
  refuse("adafactor");
}

void lamb_squares(const Launch&, const AdamArrays&, const LambSegment*, std::int64_t,
                  const AdamSettings&, double*) {
  refuse("lamb_squares");
}

void lamb(const Launch&, const AdamArrays&, const LambSegment*, std::int64_t, const AdamSettings&) {
  refuse("lamb");
}

void lars(const Launch&, const LarsArrays&, const LarsSegment*, std::int64_t, const LarsSettings&) {
  refuse("lars");
}

void lion(const Launch&, const LionArrays&, const LionSegment*, std::int64_t, const LionSettings&) {
  refuse("lion");
}

void lion_8bit(const Launch&, const Lion8BitArrays&, const RoundedSegment*, std::int64_t,
               const LionSettings&) {
  refuse("lion_8bit");
}

void sgd(const Launch&, const SgdArrays&, const SgdSegment*, std::int64_t, const SgdSettings&) {
  refuse("sgd");
}

void pack(const Launch&, DType, DType, const PackPiece*, std::int64_t, float) { refuse("pack"); }

}  // namespace poise::kernels::cuda
