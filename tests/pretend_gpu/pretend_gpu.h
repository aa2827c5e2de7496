// A pretend GPU: lets poise's CUDA paths run and be tested on a machine that has none.
//
// The stand-in for libcudart (memory.cpp, streams.cpp, runtime.cpp) has devices whose memory is
// address space of this process that only kernels may touch; anything else that does gets a
// segmentation fault, as host code gets on a GPU. What is queued on a stream happens as late as the
// program's own ordering lets it, so that a wait that is missing shows. On it torch's operators
// (operators.cpp) and poise's kernels (kernels.cpp) run the loops of the CPU. Ranks are processes
// that a stand-in for libnccl (nccl.cpp) joins over shared memory.
#pragma once

#include <driver_types.h>

#include <cstddef>
#include <functional>

// Its users are compiled with -fvisibility=hidden.
#pragma GCC visibility push(default)
namespace pretend_gpu {

inline constexpr int kHost = -1;

int device_count();
int current_device();
int device_of(const void* address);  // kHost: no device's memory
bool is_pinned(const void* address);

// The memory of a device may be touched while one of these lives: what makes a kernel of host
// code.
class Kernel {
 public:
  explicit Kernel(int device);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

 private:
  int device_;
};

// Queues a kernel. As on a GPU the stream must be one of the current device.
cudaError_t launch(cudaStream_t stream, std::function<void()> kernel);

// Queues what waits for other processes: `attempt` is called again and again until it returns true,
// also while the program asks for nothing.
cudaError_t launch_attempts(cudaStream_t stream, std::function<bool()> attempt);

// Runs what was queued on the stream: what a kernel that is run at once must find done.
void reach(cudaStream_t stream);

}  // namespace pretend_gpu
#pragma GCC visibility pop
