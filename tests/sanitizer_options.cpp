// What the sanitizers of the asan preset are asked for, compiled in because test programs also run
// while the build lists their tests. No leaks: torch keeps registries for the life of the process
// that would be reported. No ODR check: torch's libraries each hold copies of the same inline data.
#include "poise/export.h"

extern "C" POISE_API const char* __asan_default_options() {
  return "detect_leaks=0:detect_odr_violation=0";
}
extern "C" POISE_API const char* __ubsan_default_options() {
  return "print_stacktrace=1:halt_on_error=1";
}
