// Device memory between guard pages.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <new>

#include "kernels/cuda_on_cpu/cuda_runtime.h"
#include "kernels/cuda_on_cpu/device.h"
#include "poise/error.h"

namespace poise::kernels::cuda_on_cpu {
namespace {

constexpr std::size_t kPage = 4096;
constexpr unsigned char kPoison = 0xFF;

struct Array {
  std::size_t bytes;
  unsigned char* pages;  // the first one and the last one may not be touched
  std::size_t length;    // of the pages
  bool on_device = false;
};

// Never destroyed: torch keeps tensors until the very end.
std::map<void*, Array>& arrays() {
  static auto& all = *new std::map<void*, Array>;
  return all;
}

bool full = false;

// Says who touched a guard page; the program then ends as it would have.
void on_bad_access(int signal, siginfo_t* info, void*) {
  char text[160];
  const int length = std::snprintf(text, sizeof(text),
                                   "thread %u of block %u (the last ones to run) touched %p, which "
                                   "is outside of every array\n",
                                   threadIdx.x, blockIdx.x, info->si_addr);
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) _exit(1);
  ::signal(signal, SIG_DFL);
}

}  // namespace

void* guarded_memory(std::size_t bytes) {
  static const bool handled = [] {
    struct sigaction action {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &action, nullptr) == 0;
  }();
  POISE_CHECK(handled);
  const std::size_t inside = (bytes + kPage - 1) / kPage * kPage;
  void* const mapped =
      mmap(nullptr, inside + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  POISE_CHECK(mapped != MAP_FAILED);
  auto* const pages = static_cast<unsigned char*>(mapped);
  POISE_CHECK(mprotect(pages + kPage, inside, PROT_READ | PROT_WRITE) == 0);
  std::memset(pages + kPage, kPoison, inside);
  void* const data = pages + kPage + inside - bytes;
  arrays()[data] = {bytes, pages, inside + 2 * kPage};
  return data;
}

void free_guarded_memory(void* data) {
  const auto found = arrays().find(data);
  POISE_CHECK(found != arrays().end(), "freed twice, or never allocated");
  const Array array = found->second;
  arrays().erase(found);
  const auto* const begin = static_cast<unsigned char*>(data);
  if (std::any_of<const unsigned char*>(array.pages + kPage, begin,
                                        [](unsigned char byte) { return byte != kPoison; })) {
    set_fault("an array was written to before its begin");
  }
  munmap(array.pages, array.length);
}

std::size_t arrays_on_device() {
  return static_cast<std::size_t>(std::count_if(
      arrays().begin(), arrays().end(), [](const auto& one) { return one.second.on_device; }));
}

void Device::set_full(bool now) { full = now; }

void* allocate_on_device(std::size_t bytes, void* stream) {
  if (full) throw std::bad_alloc();
  check_stream(stream);
  void* const data = guarded_memory(bytes);
  arrays().at(data).on_device = true;
  return data;
}

void free_on_device(void* data) {
  const auto found = arrays().find(data);
  if (found == arrays().end() || !found->second.on_device) {
    set_fault("what was freed is not device memory");
    return;
  }
  free_guarded_memory(data);
}

}  // namespace poise::kernels::cuda_on_cpu

using namespace poise::kernels::cuda_on_cpu;

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  check_stream(stream);
  const auto found = arrays().find(target);
  if (kind != cudaMemcpyHostToDevice || found == arrays().end() || !found->second.on_device ||
      bytes > found->second.bytes) {
    set_fault(
        "a copy that is not one of the host's memory into an array of the device, at most as "
        "large");
    return cudaErrorUnknown;
  }
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
