// Chooses the instruction set of the CPU loops.
#include "kernels/isa.h"

#include <atomic>
#include <cstdlib>

#include "kernels/cpu/loops.h"
#include "poise/error.h"

namespace poise::kernels {
namespace {

constexpr int kNone = -1;

// Process-wide because the choice is a property of the CPU; only IsaOverride writes it.
std::atomic<int> overridden{kNone};

bool cpu_has(Isa isa) {
#if defined(POISE_ISA_AVX2)
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2");
#endif
#if defined(POISE_ISA_AVX512)
  if (isa == Isa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::baseline;
}

Isa chosen_isa() {
  // Read once: later changes of the environment change nothing.
  static const Isa chosen = [] {
    const char* forced = std::getenv("POISE_CPU_ISA");
    return choose_isa(forced != nullptr ? forced : "");
  }();
  return chosen;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::baseline:
      return "baseline";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> available;
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (cpu_has(isa)) available.push_back(isa);
  }
  return available;
}

Isa choose_isa(const std::string& forced) {
  const std::vector<Isa> available = available_isas();
  if (forced.empty()) return available.back();
  std::string names;
  for (const Isa isa : available) {
    if (forced == name_of(isa)) return isa;
    names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  fail("kernels", "POISE_CPU_ISA is not an instruction set that this CPU and build have: '", forced,
       "'; use one of: ", names, ", or unset it");
}

Isa active_isa() {
  const int current = overridden.load(std::memory_order_relaxed);
  return current == kNone ? chosen_isa() : static_cast<Isa>(current);
}

IsaOverride::IsaOverride(Isa isa) : previous_(overridden.load()) {
  POISE_CHECK(cpu_has(isa), name_of(isa));
  overridden.store(static_cast<int>(isa));
}

IsaOverride::~IsaOverride() { overridden.store(previous_); }

const cpu::Loops& cpu::loops() {
  switch (active_isa()) {
#if defined(POISE_ISA_AVX512)
    case Isa::avx512:
      return avx512::kLoops;
#endif
#if defined(POISE_ISA_AVX2)
    case Isa::avx2:
      return avx2::kLoops;
#endif
    default:
      return baseline::kLoops;
  }
}

}  // namespace poise::kernels
