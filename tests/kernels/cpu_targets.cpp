// Every instruction set of this CPU, on the calling thread and on two.
#include <thread>

#include "kernels/targets.h"

namespace poise::kernels::testing {
namespace {

// Two threads, cut at an uneven place.
void two_threads(std::int64_t count, std::int64_t grain, RangeBody body, void* context) {
  const std::int64_t cut = count / 3;
  std::thread other([&] {
    if (cut > 0) body(context, 0, cut);
  });
  if (cut < count) body(context, cut, count);
  other.join();
}

}  // namespace

Launch Target::launch() const {
  Launch launch;
  launch.parallel_for = threads ? two_threads : nullptr;
  return launch;
}

std::shared_ptr<void> Target::force() const { return std::make_shared<IsaOverride>(isa); }

std::vector<Target> targets() {
  std::vector<Target> all;
  for (const Isa isa : available_isas()) {
    for (const bool threads : {false, true}) {
      all.push_back({std::string(name_of(isa)) + (threads ? "_threads" : ""),
                     c10::Device(c10::kCPU), isa, threads});
    }
  }
  return all;
}

std::string reason_to_skip() { return ""; }

}  // namespace poise::kernels::testing
