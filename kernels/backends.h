// The back ends behind the doors norm.cpp, accumulate.cpp, ...: same functions, one namespace each.
// Either cuda/ or no_cuda/ defines poise::kernels::cuda.
#pragma once

#include "kernels/accumulate.h"
#include "kernels/adafactor.h"
#include "kernels/adamw.h"
#include "kernels/adamw_low.h"
#include "kernels/lamb.h"
#include "kernels/lars.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/sgd.h"

#define POISE_KERNEL_BACKEND(backend)                                                             \
  namespace backend {                                                                             \
  void squared_norms(const Launch&, DType, const void*, const Piece*, std::int64_t, double*);     \
  void accumulate(const Launch&, Accumulate, float*, DType, const void*, std::int64_t, float,     \
                  double*);                                                                       \
  void adamw(const Launch&, const AdamArrays&, const AdamSegment*, std::int64_t,                  \
             const AdamSettings&);                                                                \
  void adamw_bf16(const Launch&, const AdamBf16Arrays&, const RoundedSegment*, std::int64_t,      \
                  const AdamSettings&);                                                           \
  void adamw_8bit(const Launch&, const Adam8BitArrays&, const RoundedSegment*, std::int64_t,      \
                  const AdamSettings&);                                                           \
  void factor_sums(const Launch&, const FactoredArrays&, const FactoredSegment*, std::int64_t,    \
                   double, double*);                                                              \
  void factored_squares(const Launch&, const FactoredArrays&, const FactoredSegment*,             \
                        std::int64_t, double, double*);                                           \
  void adafactor(const Launch&, const FactoredArrays&, const FactoredSegment*, std::int64_t,      \
                 double);                                                                         \
  void lamb_squares(const Launch&, const AdamArrays&, const LambSegment*, std::int64_t,           \
                    const AdamSettings&, double*);                                                \
  void lamb(const Launch&, const AdamArrays&, const LambSegment*, std::int64_t,                   \
            const AdamSettings&);                                                                 \
  void lars(const Launch&, const LarsArrays&, const LarsSegment*, std::int64_t,                   \
            const LarsSettings&);                                                                 \
  void lion(const Launch&, const LionArrays&, const LionSegment*, std::int64_t,                   \
            const LionSettings&);                                                                 \
  void lion_8bit(const Launch&, const Lion8BitArrays&, const RoundedSegment*, std::int64_t,       \
                 const LionSettings&);                                                            \
  void sgd(const Launch&, const SgdArrays&, const SgdSegment*, std::int64_t, const SgdSettings&); \
  void pack(const Launch&, DType, DType, const PackPiece*, std::int64_t, float);                  \
  }

namespace poise::kernels {
POISE_KERNEL_BACKEND(reference)
POISE_KERNEL_BACKEND(cpu)
POISE_KERNEL_BACKEND(cuda)

namespace cuda {
// The thread's current device while it lives: kernels are started there, whatever it was.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
};
}  // namespace cuda

// Calls `call(backend's function)`; one place for the switch of every door.
#define POISE_KERNEL_DISPATCH(launch, function, ...)  \
  switch ((launch).backend) {                         \
    case Backend::reference:                          \
      return reference::function(__VA_ARGS__);        \
    case Backend::cpu:                                \
      return cpu::function(__VA_ARGS__);              \
    case Backend::cuda: {                             \
      const cuda::DeviceScope scope((launch).device); \
      return cuda::function(__VA_ARGS__);             \
    }                                                 \
  }
}  // namespace poise::kernels
#undef POISE_KERNEL_BACKEND
