// The emulation finds what is wrong with kernels that are wrong on purpose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/backends.h"
#include "kernels/cuda_on_cpu/cuda_runtime.h"
#include "kernels/cuda_on_cpu/device.h"
#include "kernels/norm.h"
#include "poise/error.h"

namespace poise::kernels::cuda_on_cpu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The fault of one launch.
template <class... Parameters, class... Arguments>
std::string run(unsigned blocks, unsigned count, void (*kernel)(Parameters...),
                Arguments... arguments) {
  const cuda::DeviceScope scope(Device::launch().device);
  cudaLaunchConfig_t config;
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(count);
  config.stream = static_cast<cudaStream_t>(Device::launch().stream);
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
  const std::string fault = Device::fault();
  EXPECT_EQ(status != cudaSuccess, !fault.empty()) << fault;
  return fault;
}

__global__ void barrier_for_some() {
  if (threadIdx.x < 20) __syncthreads();
}

__global__ void two_barriers() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void shuffle(unsigned mask, int width, unsigned lanes, int* out) {
  if (threadIdx.x >= lanes) return;
  const int value = __shfl_down_sync(mask, static_cast<int>(threadIdx.x), 1, width);
  if (out != nullptr) out[threadIdx.x] = value;
}

// Thread 0 says how many threads there are; the others read it.
template <bool with_barrier>
__global__ void tell(unsigned* out) {
  __shared__ unsigned told;
  if (threadIdx.x == 0) told = blockDim.x + blockIdx.x;
  if (with_barrier) __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = told;
}

__global__ void touch(char* place) { *place = 1; }

class Faults : public ::testing::Test {
 protected:
  Device device_{Order::forwards};
};

TEST_F(Faults, BarriersThatNotAllThreadsReach) {
  EXPECT_THAT(run(2, 32, barrier_for_some),
              AllOf(HasSubstr("thread 0 of block 0 waits at a barrier, " __FILE__ ":"),
                    HasSubstr("; thread 20 of block 0 has ended")));
  EXPECT_THAT(run(1, 32, two_barriers), HasSubstr("; thread 1 of block 0 waits at a barrier"));
  EXPECT_EQ(run(2, 20, barrier_for_some), "");
}

TEST_F(Faults, ShufflesThatMissALane) {
  constexpr unsigned kLow = 0xFFFF, kAll = 0xFFFFFFFF;
  EXPECT_THAT(run(1, 32, shuffle, kAll, 32, 31u, nullptr), HasSubstr("waits at a shuffle"));
  EXPECT_THAT(run(1, 16, shuffle, kAll, 16, 16u, nullptr),
              HasSubstr("not all lanes of its mask come there"));
  EXPECT_THAT(run(1, 17, shuffle, kLow, 16, 17u, nullptr),
              HasSubstr("a shuffle of thread 16, which is not in its mask"));
  EXPECT_THAT(run(1, 16, shuffle, kLow, 32, 16u, nullptr),
              HasSubstr("thread 15 of block 0 waits at a shuffle"));
  std::vector<int> out(32);
  EXPECT_EQ(run(1, 32, shuffle, kAll, 16, 32u, out.data()), "");
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane % 16 == 15 ? lane : lane + 1);
}

TEST(FaultsOfOrder, AMissingBarrierShowsInOneOfTheOrders) {
  for (const Order order : {Order::forwards, Order::backwards}) {
    const Device device(order);
    std::vector<unsigned> out(3 * 64), expected(3 * 64);
    for (unsigned i = 0; i < out.size(); ++i) expected[i] = 64 + i / 64;
    EXPECT_EQ(run(3, 64, tell<true>, out.data()), "");
    EXPECT_EQ(out, expected);
    EXPECT_EQ(run(3, 64, tell<false>, out.data()), "");
    EXPECT_EQ(out == expected, order == Order::forwards);
  }
}

TEST(FaultsOfOrder, LargeGridsAreCut) {
  const Device device(Order::backwards, 2);
  std::vector<unsigned> out(3 * 8, 7);
  EXPECT_EQ(run(3, 8, tell<true>, out.data()), "");
  EXPECT_EQ(out.front(), 8u);
  EXPECT_EQ(out.back(), 7u);
}

TEST_F(Faults, OfMemoryAndStreams) {
  const auto stream = static_cast<cudaStream_t>(Device::launch().stream);
  ASSERT_EQ(cudaSetDevice(Device::launch().device), cudaSuccess);
  void* data = allocate_on_device(10, stream);
  EXPECT_EQ(static_cast<unsigned char*>(data)[9], 0xFF);
  EXPECT_EQ(Device::fault(), "1 device arrays are not freed");
  const char source[11] = {};
  EXPECT_EQ(cudaMemcpyAsync(data, source, 10, cudaMemcpyHostToDevice, stream), cudaSuccess);
  EXPECT_NE(cudaMemcpyAsync(data, source, 11, cudaMemcpyHostToDevice, stream), cudaSuccess);
  static_cast<char*>(data)[-1] = 0;
  free_on_device(data);
  EXPECT_THAT(Device::fault(), HasSubstr("a copy that is not one"));
  free_on_device(data);
  EXPECT_EQ(Device::fault(), "what was freed is not device memory");
  free_on_device(allocate_on_device(10, nullptr));
  EXPECT_EQ(Device::fault(), "a call on a stream that is not the Launch's");
  cudaSetDevice(0);
  free_on_device(allocate_on_device(10, stream));
  EXPECT_EQ(Device::fault(), "a call on a device that is not the Launch's");
  EXPECT_THAT(run(0, 32, barrier_for_some), HasSubstr("a launch of 0 blocks of 32 threads"));
}

TEST_F(Faults, WhereThereIsNoMemoryNothingIsLeftBehind) {
  const Piece pieces[2] = {{0, 4}, {4, 8}};
  const float data[8] = {};
  double out[2] = {};
  Device::set_full(true);
  EXPECT_THROW(squared_norms(Device::launch(), DType::f32, data, pieces, 2, out), std::bad_alloc);
  Device::set_full(false);
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(Device::fault(), "");
}

TEST_F(Faults, AccessesOutsideOfArraysEndTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto beyond = [] {
    auto* const data = static_cast<char*>(guarded_memory(10));
    run(1, 4, touch, data + 10);
  };
  EXPECT_DEATH(beyond(), "thread 0 of block 0 .* touched .* outside of every array");
}

}  // namespace
}  // namespace poise::kernels::cuda_on_cpu
