// Devices, errors, and what no kernel of torch's may do: be launched.
#include "runtime.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "pretend_gpu.h"

#undef cudaGetDeviceProperties  // a macro for the name of an older version

namespace pretend_gpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;
thread_local int locks_of_thread = 0;

const char* const kSeed = std::getenv("PRETEND_GPU_SEED");

std::mutex& the_lock() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// Torch must come by here only where operators.cpp has missed an operator.
cudaError_t missing(const char* name) {
  std::fprintf(stderr, "pretend GPU: %s is not there\n", name);
  return failed(cudaErrorNotSupported);
}

}  // namespace

Lock::Lock() {
  if (locks_of_thread++ == 0) the_lock().lock();
}
Lock::~Lock() {
  if (--locks_of_thread == 0) the_lock().unlock();
}
void let_others() {
  the_lock().unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  the_lock().lock();
}

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

int device_count() {
  static const int count = [] {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible && *visible == '\0') return 0;
    const char* said = std::getenv("PRETEND_GPU_DEVICES");
    return said ? std::atoi(said) : 1;
  }();
  return count;
}

int current_device() { return device_of_thread; }

unsigned random_below(unsigned bound) {
  static auto* const random =
      new std::mt19937(kSeed ? static_cast<unsigned>(std::atoi(kSeed)) : 7U);
  return static_cast<unsigned>((*random)()) % bound;
}

bool sometimes_early() { return kSeed != nullptr; }

}  // namespace pretend_gpu

using namespace pretend_gpu;

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle: a stream or event of another device";
    case cudaErrorNotSupported:
      return "the pretend GPU does not have this";
    default:
      return "an error of the pretend GPU";
  }
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "Pretend GPU");
  // No two processes see the same one.
  const int owner[] = {getpid(), device};
  std::memcpy(properties->uuid.bytes, owner, sizeof(owner));
  properties->totalGlobalMem = kDeviceBytes;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = 200 << 10;
  properties->regsPerBlock = 65536;
  properties->l2CacheSize = 32 << 20;
  properties->textureAlignment = 512;
  for (int axis = 0; axis < 3; ++axis) {
    properties->maxGridSize[axis] = 65535;
    properties->maxThreadsDim[axis] = 1024;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrMultiProcessorCount  ? 4
                                                          : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return missing("peer access"); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -2;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, std::size_t*) {
  if (status) *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return missing(name);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t) {
  return missing("cudaLaunchKernel");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return missing("cudaLaunchKernelExC");
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, std::size_t,
                                        cudaStream_t) {
  return missing("cudaLaunchCooperativeKernel");
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t, void*) {
  return missing("cudaLaunchHostFunc");
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return missing("cudaFuncGetAttributes");
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   std::size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

// The kernels compiled into torch's libraries register themselves while those are loaded.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                            void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
// A launch by <<<>>>.
unsigned __cudaPushCallConfiguration(dim3, dim3, std::size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(void**, const void*) { return missing("__cudaGetKernel"); }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, std::size_t, cudaStream_t) {
  return missing("__cudaLaunchKernel");
}

}  // extern "C"
