// Memory: one span of address space for each device, closed but while a kernel runs, and host
// memory that is pinned.
#include "memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "pretend_gpu.h"
#include "runtime.h"

namespace pretend_gpu {
namespace {

constexpr std::size_t kPage = 4096;
// NaN in every floating point type: what was never written shows.
constexpr int kUnwritten = 0xFF;

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage + (bytes == 0 ? kPage : 0);
}

class DeviceMemory {
 public:
  DeviceMemory() {
    void* mapped =
        mmap(nullptr, kDeviceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("pretend GPU: mmap");
      std::abort();
    }
    begin_ = static_cast<char*>(mapped);
    madvise(mapped, kDeviceBytes, MADV_HUGEPAGE);  // fewer pages to open and close
  }

  bool holds(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= begin_ && at < begin_ + kDeviceBytes;
  }
  std::size_t free_bytes() const { return kDeviceBytes - used_; }

  // The first gap that is large enough; null: there is none.
  char* take(std::size_t bytes) {
    bytes = whole_pages(bytes);
    char* at = begin_;
    for (const auto& [block, size] : blocks_) {
      if (static_cast<std::size_t>(block - at) >= bytes) break;
      at = block + size;
    }
    if (bytes > kDeviceBytes || at > begin_ + kDeviceBytes - bytes) return nullptr;
    blocks_[at] = bytes;
    used_ += bytes;
    const auto end = static_cast<std::size_t>(at - begin_) + bytes;
    if (end > reached_) {
      reached_ = end;
      if (kernels_ > 0) protect(PROT_READ | PROT_WRITE);
    }
    return at;
  }
  // The bytes of the block; 0: there is no such block.
  std::size_t size_of(char* block) const {
    const auto found = blocks_.find(block);
    return found == blocks_.end() ? 0 : found->second;
  }
  void give_back(char* block) {
    used_ -= blocks_.at(block);
    blocks_.erase(block);
  }

  void open() {
    if (kernels_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--kernels_ == 0) protect(PROT_NONE);
  }

 private:
  void protect(int access) const {
    if (reached_ > 0) mprotect(begin_, reached_, access);
  }

  char* begin_ = nullptr;
  std::size_t reached_ = 0;  // bytes that were ever given out: the rest is never opened
  std::size_t used_ = 0;
  int kernels_ = 0;  // that run now, on any thread
  std::map<char*, std::size_t> blocks_;
};

// Never destroyed: torch frees memory while the process ends.
std::vector<DeviceMemory>& memories() {
  static auto* all = new std::vector<DeviceMemory>(device_count());
  return *all;
}
std::map<char*, std::size_t>& pinned() {
  static auto* blocks = new std::map<char*, std::size_t>;
  return *blocks;
}

class OpenFor {  // host memory: nothing to open
 public:
  explicit OpenFor(const void* address) : device_(device_of(address)) {
    if (device_ != kHost) memories()[device_].open();
  }
  ~OpenFor() {
    if (device_ != kHost) memories()[device_].close();
  }

 private:
  int device_;
};

cudaError_t allocate(void** pointer, std::size_t bytes, int device) {
  const Lock lock;
  DeviceMemory& memory = memories()[device];
  char* block = memory.take(bytes);
  if (block == nullptr) return failed(cudaErrorMemoryAllocation);
  fill_bytes(block, kUnwritten, memory.size_of(block));
  *pointer = block;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  const int device = device_of(pointer);
  auto* block = static_cast<char*>(pointer);
  const std::size_t bytes = device == kHost ? 0 : memories()[device].size_of(block);
  if (bytes == 0) return failed(cudaErrorInvalidValue);
  fill_bytes(block, kUnwritten, bytes);
  memories()[device].give_back(block);
  return cudaSuccess;
}

}  // namespace

int device_of(const void* address) {
  for (int device = 0; device < device_count(); ++device) {
    if (memories()[device].holds(address)) return device;
  }
  return kHost;
}

bool is_pinned(const void* address) {
  const Lock lock;
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto after = pinned().upper_bound(at);
  if (after == pinned().begin()) return false;
  const auto& [block, bytes] = *--after;
  return at < block + bytes;
}

Kernel::Kernel(int device) : device_(device) {
  const Lock lock;
  memories()[device_].open();
}
Kernel::~Kernel() {
  const Lock lock;
  memories()[device_].close();
}

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  const OpenFor target(to), source(from);
  std::memmove(to, from, bytes);
}

void fill_bytes(void* to, int value, std::size_t bytes) {
  const OpenFor target(to);
  std::memset(to, value, bytes);
}

}  // namespace pretend_gpu

using namespace pretend_gpu;

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return allocate(pointer, bytes, current_device());
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const Lock lock;
  reach_all();  // it waits for the device
  return release(pointer);
}

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t stream) {
  return allocate(pointer, bytes, device_of_stream(stream));
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  const Lock lock;
  reach(stream);
  return release(pointer);
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Lock lock;
  *free = memories()[current_device()].free_bytes();
  *total = kDeviceBytes;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  const Lock lock;
  bytes = whole_pages(bytes);
  *pointer = std::aligned_alloc(kPage, bytes);
  if (*pointer == nullptr) return failed(cudaErrorMemoryAllocation);
  std::memset(*pointer, kUnwritten, bytes);
  pinned()[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const Lock lock;
  reach_all();
  if (pinned().erase(static_cast<char*>(pointer)) == 0) return failed(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  const Lock lock;
  if (is_pinned(pointer)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  pinned()[static_cast<char*>(pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  const Lock lock;
  reach_all();
  if (pinned().erase(static_cast<char*>(pointer)) > 0) return cudaSuccess;
  return failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->device = current_device();
  attributes->hostPointer = attributes->devicePointer = const_cast<void*>(pointer);
  const int device = device_of(pointer);
  if (device != kHost) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = device;
    attributes->hostPointer = nullptr;
  } else if (is_pinned(pointer)) {
    attributes->type = cudaMemoryTypeHost;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->devicePointer = nullptr;
  }
  return cudaSuccess;
}

}  // extern "C"

// For tests, by ctypes.
extern "C" std::size_t pretend_gpu_pinned_bytes() {
  const pretend_gpu::Lock lock;
  std::size_t bytes = 0;
  for (const auto& [begin, size] : pretend_gpu::pinned()) bytes += size;
  return bytes;
}
