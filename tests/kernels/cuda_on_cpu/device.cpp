// Blocks of fibres.
#include "kernels/cuda_on_cpu/device.h"

#include <ucontext.h>

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cuda_on_cpu/cuda_runtime.h"
#include "poise/error.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace poise::kernels::cuda_on_cpu {
namespace {

constexpr std::size_t kStack = 64 << 10;
constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr int kDevice = 1, kDevices = 2;
int current_device = 0;

enum class State { ready, at_barrier, at_shuffle, over };

struct Shuffle {
  unsigned mask = 0, delta = 0;
  int width = 0;
  std::uint64_t value = 0;  // of this thread; later that of the other one
};

struct Thread {
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStack);
  ucontext_t context{};
  State state = State::over;
  Site site;  // of the barrier or shuffle it waits at
  Shuffle shuffle;
};

struct Settings {
  Order order = Order::forwards;
  unsigned most_blocks = 0;  // 0: no Device lives
} settings;
std::string first_fault, last_fault;
std::int64_t faults = 0;
std::vector<Thread> threads;
ucontext_t scheduler;
const std::function<void()>* body = nullptr;

void run_thread() {
  (*body)();
  threads[threadIdx.x].state = State::over;
}

void prepare(Thread& thread) {
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = kStack;
  thread.context.uc_link = &scheduler;
  makecontext(&thread.context, run_thread, 0);
  thread.state = State::ready;
}

void wait_as(State state, const Site& site) {
  Thread& self = threads[threadIdx.x];
  self.state = state;
  self.site = site;
  swapcontext(&self.context, &scheduler);
}

bool same_site(const Site& a, const Site& b) {
  return a.line() == b.line() && std::string_view(a.file_name()) == b.file_name();
}

std::string describe(const Thread& thread) {
  const std::string name = join("thread ", &thread - threads.data(), " of block ", blockIdx.x);
  if (thread.state == State::over) return name + " has ended";
  return join(name, " waits at a ", thread.state == State::at_barrier ? "barrier" : "shuffle", ", ",
              thread.site.file_name(), ":", thread.site.line());
}

// The shuffle that `number` waits at, of all lanes of its mask; false: some have not come.
bool all_came(unsigned number) {
  const unsigned warp = number / kWarp * kWarp;
  const Thread& self = threads[number];
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((self.shuffle.mask >> lane & 1) == 0) continue;
    if (warp + lane >= blockDim.x) return false;
    const Thread& other = threads[warp + lane];
    if (other.state != State::at_shuffle || other.shuffle.mask != self.shuffle.mask ||
        !same_site(other.site, self.site)) {
      return false;
    }
  }
  return true;
}

// Gives all lanes of `number`'s mask their values and lets them go on.
void exchange(unsigned number) {
  const unsigned warp = number / kWarp * kWarp, mask = threads[number].shuffle.mask;
  std::uint64_t values[kWarp] = {};
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (mask >> lane & 1) values[lane] = threads[warp + lane].shuffle.value;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    Thread& thread = threads[warp + lane];
    const auto width = static_cast<unsigned>(thread.shuffle.width);
    const unsigned source = lane % width + thread.shuffle.delta;
    const unsigned from = source < width ? lane + thread.shuffle.delta : lane;
    if ((mask >> from & 1) == 0) {
      set_fault(join(describe(thread), " and reads lane ", from, ", which is not in the mask"));
    }
    thread.shuffle.value = values[from];
    thread.state = State::ready;
  }
}

// Lets those go on whose wait is over; false: there are none.
bool release() {
  bool any = false, barrier = true;
  for (unsigned t = 0; t < blockDim.x; ++t) {
    if (threads[t].state == State::at_shuffle && all_came(t)) {
      exchange(t);
      any = true;
    }
    barrier &= threads[t].state == State::at_barrier && same_site(threads[t].site, threads[0].site);
  }
  if (barrier) {
    for (unsigned t = 0; t < blockDim.x; ++t) threads[t].state = State::ready;
  }
  return any || barrier;
}

unsigned nth(unsigned n, unsigned count) {
  return settings.order == Order::forwards ? n : count - 1 - n;
}

// False: its threads wait for each other in vain.
bool run_block() {
  for (unsigned t = 0; t < blockDim.x; ++t) prepare(threads[t]);
  do {
    for (unsigned n = 0; n < blockDim.x; ++n) {
      threadIdx.x = nth(n, blockDim.x);
      Thread& thread = threads[threadIdx.x];
      if (thread.state == State::ready) swapcontext(&scheduler, &thread.context);
    }
  } while (release());
  const auto end = threads.begin() + blockDim.x;
  const auto waits =
      std::find_if(threads.begin(), end, [](const Thread& t) { return t.state != State::over; });
  if (waits == end) return true;
  const auto other = std::find_if(threads.begin(), end, [&](const Thread& t) {
    return t.state != waits->state || !same_site(t.site, waits->site);
  });
  set_fault(join(describe(*waits), other == end ? " and not all lanes of its mask come there"
                                                : join("; ", describe(*other))));
  return false;
}

}  // namespace

void set_fault(const std::string& what) {
  ++faults;
  last_fault = what;
  if (first_fault.empty()) first_fault = what;
}

void check_stream(const void* stream) {
  if (current_device != kDevice) set_fault("a call on a device that is not the Launch's");
  if (stream != Device::launch().stream) set_fault("a call on a stream that is not the Launch's");
}

cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  POISE_CHECK(settings.most_blocks > 0, "no Device lives");
  const std::int64_t before = faults;
  check_stream(config.stream);
  if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > kMostThreads) {
    set_fault(join("a launch of ", config.gridDim.x, " blocks of ", config.blockDim.x, " threads"));
    return cudaErrorUnknown;
  }
  gridDim = dim3(std::min(config.gridDim.x, settings.most_blocks));
  blockDim = config.blockDim;
  if (threads.size() < blockDim.x) threads.resize(blockDim.x);
  body = &thread;
  bool whole = true;
  for (unsigned n = 0; whole && n < gridDim.x; ++n) {
    blockIdx.x = nth(n, gridDim.x);
    whole = run_block();
  }
  return faults == before ? cudaSuccess : cudaErrorUnknown;
}

std::uint64_t shuffle_down(unsigned mask, std::uint64_t value, unsigned delta, int width,
                           const Site& site) {
  Thread& self = threads[threadIdx.x];
  if ((mask >> threadIdx.x % kWarp & 1) == 0) {
    set_fault(join("a shuffle of thread ", threadIdx.x,
                   ", which is not in its mask: ", site.file_name(), ":", site.line()));
    return value;
  }
  self.shuffle = {mask, delta, width, value};
  wait_as(State::at_shuffle, site);
  return self.shuffle.value;
}

Device::Device(Order order, unsigned most_blocks) {
  settings = {order, most_blocks};
  current_device = 0;
}
Device::~Device() { settings = {}; }

Launch Device::launch() {
  Launch launch;
  launch.backend = Backend::cuda;
  launch.stream = &settings;
  launch.device = kDevice;
  launch.allocate = allocate_on_device;
  launch.release = free_on_device;
  return launch;
}

std::string Device::fault() {
  if (arrays_on_device() > 0) set_fault(join(arrays_on_device(), " device arrays are not freed"));
  return std::exchange(first_fault, "");
}

}  // namespace poise::kernels::cuda_on_cpu

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t) {
  return poise::kernels::cuda_on_cpu::last_fault.c_str();
}

void __syncthreads(const std::source_location& site) {
  using namespace poise::kernels::cuda_on_cpu;
  wait_as(State::at_barrier, site);
}

cudaError_t cudaGetDevice(int* device) {
  *device = poise::kernels::cuda_on_cpu::current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  using namespace poise::kernels::cuda_on_cpu;
  if (device < 0 || device >= kDevices) return cudaErrorUnknown;
  current_device = device;
  return cudaSuccess;
}
