// How a kernel's arithmetic is written once and compiled three ways: for the reference loop, for
// the CPU loops of every instruction set, and for the GPU.
#pragma once

// Internal linkage and always inlined: a body compiled for one instruction set must never be the
// copy that the linker keeps for another.
#if defined(__CUDACC__)
#define POISE_BODY static __host__ __device__ __forceinline__
#else
#define POISE_BODY static inline __attribute__((always_inline, unused))
#endif
