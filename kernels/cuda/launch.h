// All that CUDA adds to a kernel body: device copies of small host arrays, and the loop over chunks
// and their elements. A block takes whole chunks (the same ones as on the CPU), its threads
// neighbouring elements; every index is 64-bit. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
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

// Memory of the device in stream order: who gets it next comes after the work queued before.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const Launch& launch, std::int64_t size)
      : launch_(launch),
        data_(static_cast<T*>(
            launch.allocate(static_cast<std::size_t>(std::max<std::int64_t>(size, 1)) * sizeof(T),
                            launch.stream))) {}
  ~DeviceArray() { launch_.release(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }

 private:
  const Launch& launch_;
  T* const data_;
};

// A ChunkMap as device code sees it. A single span, the commonest, needs no tables.
struct Spans {
  const std::int64_t* first_chunk;  // num_spans + 1 entries
  const std::int64_t* numel;
  std::int64_t num_spans;
  std::int64_t chunks;
  std::int64_t single;  // elements of the only span
};

POISE_BODY std::int64_t first_chunk_of(const Spans& spans, std::int64_t span) {
  if (spans.num_spans == 1) return span == 0 ? 0 : spans.chunks;
  return spans.first_chunk[span];
}

POISE_BODY Chunk chunk_at(const Spans& spans, std::int64_t number) {
  const bool single = spans.num_spans == 1;
  const std::int64_t span = single ? 0 : span_of_chunk(spans.first_chunk, spans.num_spans, number);
  const std::int64_t offset = (number - first_chunk_of(spans, span)) * kChunk;
  const std::int64_t left = (single ? spans.single : spans.numel[span]) - offset;
  return Chunk{span, offset, left < kChunk ? left : kChunk};
}

// Returns the size afterwards.
inline std::size_t append(std::vector<unsigned char>& bytes, const void* data, std::size_t size) {
  const std::size_t before = bytes.size();
  bytes.resize(before + size);
  if (size > 0) std::memcpy(bytes.data() + before, data, size);
  return bytes.size();
}
inline std::size_t append(std::vector<unsigned char>& bytes,
                          const std::vector<std::int64_t>& numbers) {
  return append(bytes, numbers.data(), numbers.size() * sizeof(std::int64_t));
}

// A ChunkMap on the device, with a row of `Row` for each span: one allocation and one copy.
struct NoRow {};

template <class Row = NoRow>
class DeviceMap {
 public:
  DeviceMap(const Launch& launch, const ChunkMap& map, const Row* rows = nullptr)
      : spans_{nullptr, nullptr, map.spans(), map.chunks(),
               map.spans() == 1 ? map.numel().front() : 0} {
    std::vector<unsigned char> host;
    if (rows != nullptr) append(host, rows, static_cast<std::size_t>(map.spans()) * sizeof(Row));
    host.resize((host.size() + kAlignment - 1) / kAlignment * kAlignment);
    const std::size_t first_chunk = host.size();
    std::size_t numel = first_chunk;
    if (map.spans() > 1) {
      numel = append(host, map.first_chunk());
      append(host, map.numel());
    }
    if (host.empty()) return;
    memory_.emplace(launch, static_cast<std::int64_t>(host.size()));
    unsigned char* const data = memory_->data();
    // The source is pageable: the copy has left it when the call returns.
    check(
        cudaMemcpyAsync(data, host.data(), host.size(), cudaMemcpyHostToDevice, stream_of(launch)),
        "cudaMemcpyAsync");
    rows_ = reinterpret_cast<const Row*>(data);
    spans_.first_chunk = reinterpret_cast<const std::int64_t*>(data + first_chunk);
    spans_.numel = reinterpret_cast<const std::int64_t*>(data + numel);
  }

  const Spans& spans() const { return spans_; }
  const Row* rows() const { return rows_; }

 private:
  static constexpr std::size_t kAlignment = 16;
  static_assert(alignof(Row) <= kAlignment);

  Spans spans_;
  std::optional<DeviceArray<unsigned char>> memory_;
  const Row* rows_ = nullptr;
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
    const std::int64_t end = first_chunk_of(spans, span + 1);
    for (std::int64_t c = first_chunk_of(spans, span); c < end; ++c) sum += sums[c];
    out[span] = sum;
  }
}

template <class Body>
void run_each_element(const Launch& launch, const Spans& spans, Body body, const char* name) {
  if (spans.chunks == 0) return;
  run_kernel(launch, name, spans.chunks, kThreads, each_element<Body>, spans, body);
}

template <class Body>
void run_each_lane(const Launch& launch, const Spans& spans, Body body, double* out,
                   const char* name) {
  if (spans.num_spans == 0) return;
  const DeviceArray<double> sums(launch, spans.chunks);
  if (spans.chunks > 0) {
    const std::int64_t blocks = (spans.chunks * kLanes + kThreads - 1) / kThreads;
    run_kernel(launch, name, blocks, kThreads, each_lane<Body>, spans, body, sums.data());
  }
  run_kernel(launch, name, (spans.num_spans + 31) / 32, 32, join_chunks, spans, sums.data(), out);
}

}  // namespace poise::kernels::cuda
