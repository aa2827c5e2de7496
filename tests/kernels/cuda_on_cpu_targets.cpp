// The CUDA kernels compiled for the CPU: threads and blocks from the first to the last on the whole
// grid, and from the last to the first on one of two blocks.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include "kernels/cuda_on_cpu/device.h"
#include "kernels/targets.h"

namespace poise::kernels::testing {
namespace {

// The arrays that kernels are given lie between pages that nobody may touch.
class GuardedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = cuda_on_cpu::guarded_memory(bytes);
    return {data, data, raw_deleter(), c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return cuda_on_cpu::free_guarded_memory; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

class Forced {
 public:
  explicit Forced(bool backwards)
      : device_(backwards ? cuda_on_cpu::Order::backwards : cuda_on_cpu::Order::forwards,
                backwards ? 2 : 65536) {
    static GuardedAllocator guarded;
    static constexpr std::uint8_t kAboveAll = 255;
    c10::SetCPUAllocator(&guarded, kAboveAll);
  }
  ~Forced() { EXPECT_EQ(cuda_on_cpu::Device::fault(), ""); }

 private:
  cuda_on_cpu::Device device_;
};

}  // namespace

Launch Target::launch() const { return cuda_on_cpu::Device::launch(); }

std::shared_ptr<void> Target::force() const { return std::make_shared<Forced>(backwards); }

std::vector<Target> targets() {
  const c10::Device cpu(c10::kCPU);
  return {{"forwards", cpu}, {"backwards", cpu, Isa::baseline, false, true}};
}

std::string reason_to_skip() { return ""; }

}  // namespace poise::kernels::testing
