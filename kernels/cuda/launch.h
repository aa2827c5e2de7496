// All that CUDA adds to a kernel body: device copies of small host arrays, and the loop over chunks
// and their elements. A block takes whole chunks (the same ones as on the CPU), its threads
// neighbouring elements; every index is 64-bit. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/backends.h"
#include "kernels/cast.h"
#include "kernels/chunks.h"
#include "poise/error.h"

namespace poise::kernels::cuda {

inline constexpr int kThreads = 256;
inline constexpr std::int64_t kMaxBlocks = 65536;  // more chunks are taken in strides

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    fail("kernels", "CUDA error in ", what, ": ", cudaGetErrorString(status),
         "; the state of the device is lost: restart the process");
  }
}

inline cudaStream_t stream_of(const Launch& launch) {
  return static_cast<cudaStream_t>(launch.stream);
}

// A device array that lives in stream order: freed when the work queued before is done.
template <class T>
class DeviceArray {
 public:
  DeviceArray(std::int64_t size, cudaStream_t stream) : stream_(stream) {
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(size, 1)) * sizeof(T);
    const auto status = cudaMallocAsync(reinterpret_cast<void**>(&data_), bytes, stream_);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // or torch would find it at its next call
      fail("kernels", "no GPU memory for ", bytes, " bytes of a kernel's tables, which lie beside ",
           "what torch has reserved; make micro-batches smaller, or limit torch's share by "
           "torch.cuda.set_per_process_memory_fraction");
    }
    check(status, "cudaMallocAsync");
  }
  // The source is pageable: the copy has left it when the call returns.
  DeviceArray(const T* host, std::int64_t size, cudaStream_t stream) : DeviceArray(size, stream) {
    if (size == 0) return;
    check(cudaMemcpyAsync(data_, host, static_cast<std::size_t>(size) * sizeof(T),
                          cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
  }
  ~DeviceArray() { cudaFreeAsync(data_, stream_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  cudaStream_t stream_;
};

// A ChunkMap as device code sees it.
struct Spans {
  const std::int64_t* first_chunk;  // num_spans + 1 entries
  const std::int64_t* numel;
  std::int64_t num_spans;
  std::int64_t chunks;
};

POISE_BODY Chunk chunk_at(const Spans& spans, std::int64_t number) {
  const std::int64_t span = span_of_chunk(spans.first_chunk, spans.num_spans, number);
  const std::int64_t offset = (number - spans.first_chunk[span]) * kChunk;
  const std::int64_t left = spans.numel[span] - offset;
  return Chunk{span, offset, left < kChunk ? left : kChunk};
}

class DeviceMap {
 public:
  DeviceMap(const ChunkMap& map, cudaStream_t stream)
      : first_chunk_(map.first_chunk().data(), map.spans() + 1, stream),
        numel_(map.numel().data(), map.spans(), stream),
        spans_{first_chunk_.data(), numel_.data(), map.spans(), map.chunks()} {}

  const Spans& spans() const { return spans_; }

 private:
  DeviceArray<std::int64_t> first_chunk_;
  DeviceArray<std::int64_t> numel_;
  Spans spans_;
};

// The one place that starts kernels, by a plain call instead of <<<>>>: a test that runs them on
// the CPU can then stand in for it. `blocks` is cut to kMaxBlocks.
template <class... Parameters, class... Arguments>
void run_kernel(const Launch& launch, const char* name, std::int64_t blocks, int threads,
                void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream_of(launch);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// body(span, offset) once for every element of every span.
template <class Body>
__global__ void __launch_bounds__(kThreads) each_element(Spans spans, Body body) {
  for (std::int64_t number = blockIdx.x; number < spans.chunks; number += gridDim.x) {
    const Chunk chunk = chunk_at(spans, number);
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < chunk.count; i += kThreads) {
      body(chunk.span, chunk.offset + i);
    }
  }
}

// sums[c] = the square sum of chunk c, of the values that body(span, offset) returns for its
// elements. One thread is one of the chunk's virtual lanes, so the order of the CPU back ends
// holds.
template <class Body>
__global__ void __launch_bounds__(kThreads) each_lane(Spans spans, Body body, double* sums) {
  constexpr int kChunksPerBlock = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  // The two chunks of a warp may differ in length: only the 16 lanes of one chunk join.
  const unsigned group = 0xFFFFu << (threadIdx.x % 32 / kLanes * kLanes);
  const std::int64_t first = std::int64_t{blockIdx.x} * kChunksPerBlock + threadIdx.x / kLanes;
  const std::int64_t stride = std::int64_t{gridDim.x} * kChunksPerBlock;
  for (std::int64_t number = first; number < spans.chunks; number += stride) {
    const Chunk chunk = chunk_at(spans, number);
    double sum = 0;
#pragma unroll 8
    for (std::int64_t i = lane; i < chunk.count; i += kLanes) {
      sum += square_body(body(chunk.span, chunk.offset + i));
    }
    // join_lanes() with the lanes in registers: below `step` every lane adds the one `step` above.
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_down_sync(group, sum, step, kLanes);
    }
    if (lane == 0) sums[number] = sum;
  }
}

// out[s] = the sums of span s's chunks, in chunk order.
static __global__ void join_chunks(Spans spans, const double* sums, double* out) {
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::int64_t span = first; span < spans.num_spans;
       span += std::int64_t{gridDim.x} * blockDim.x) {
    double sum = 0;
    for (std::int64_t c = spans.first_chunk[span]; c < spans.first_chunk[span + 1]; ++c) {
      sum += sums[c];
    }
    out[span] = sum;
  }
}

template <class Body>
void run_each_element(const Launch& launch, const DeviceMap& map, Body body, const char* name) {
  const Spans& spans = map.spans();
  if (spans.chunks == 0) return;
  run_kernel(launch, name, spans.chunks, kThreads, each_element<Body>, spans, body);
}

template <class Body>
void run_each_lane(const Launch& launch, const DeviceMap& map, Body body, double* out,
                   const char* name) {
  const Spans& spans = map.spans();
  if (spans.num_spans == 0) return;
  const DeviceArray<double> sums(spans.chunks, stream_of(launch));
  if (spans.chunks > 0) {
    const std::int64_t blocks = (spans.chunks * kLanes + kThreads - 1) / kThreads;
    run_kernel(launch, name, blocks, kThreads, each_lane<Body>, spans, body, sums.data());
  }
  run_kernel(launch, name, (spans.num_spans + 31) / 32, 32, join_chunks, spans, sums.data(), out);
}

}  // namespace poise::kernels::cuda
