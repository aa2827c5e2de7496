// Which instruction set the CPU loops run with. Chosen once, the best this CPU has;
// POISE_CPU_ISA=baseline|avx2|avx512 forces one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "poise/export.h"

namespace poise::kernels {

enum class Isa : std::uint8_t {
  baseline,  // what the compiler gives without flags; the only one on CPUs other than x86-64
  avx2,
  avx512,
};

POISE_API const char* name_of(Isa isa);

// Those that are compiled in and that this CPU runs, worst first.
POISE_API std::vector<Isa> available_isas();

// The one in use. Throws Error where POISE_CPU_ISA names none of the available ones.
POISE_API Isa active_isa();

// What active_isa() takes for a value of POISE_CPU_ISA; empty: the best.
Isa choose_isa(const std::string& forced);

// Makes every CPU kernel of the process run with `isa` while it lives: for tests and benchmarks
// that walk all of them. Not for use from several threads.
class POISE_API IsaOverride {
 public:
  explicit IsaOverride(Isa isa);
  ~IsaOverride();
  IsaOverride(const IsaOverride&) = delete;
  IsaOverride& operator=(const IsaOverride&) = delete;

 private:
  int previous_;
};

}  // namespace poise::kernels
