// What every kernel call is told besides its arrays: where to run and how to split the work.
// Kernels are torch-free: the caller passes raw pointers, element counts and one of these.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poise::kernels {

// Element types of arrays. Sizes in bytes: 4, 2, 2.
enum class DType : std::uint8_t { f32, bf16, f16 };

inline constexpr std::int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

enum class Backend : std::uint8_t {
  reference,  // plain scalar loop, the oracle of all tests
  cpu,        // compiled per instruction set, chosen once (POISE_CPU_ISA forces one)
  cuda,       // throws where CUDA was not compiled in
};

// Runs body(context, begin, end) over pieces of [0, count) that are multiples of `grain` (but the
// last), possibly on several threads, and returns when all are done. Results must not depend on how
// the range was split.
using RangeBody = void (*)(void* context, std::int64_t begin, std::int64_t end);
using ParallelFor = void (*)(std::int64_t count, std::int64_t grain, RangeBody body, void* context);

struct Launch {
  Backend backend = Backend::cpu;
  ParallelFor parallel_for = nullptr;  // CPU back end: null runs on the calling thread
  // CUDA back end: a cudaStream_t, the number of its device, and where tables and partial sums lie.
  // allocate() throws where the device has no room; release() is called in stream order.
  void* stream = nullptr;
  int device = 0;
  void* (*allocate)(std::size_t bytes, void* stream) = nullptr;
  void (*release)(void* data) = nullptr;
};

}  // namespace poise::kernels
