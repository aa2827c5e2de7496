// Copying one chunk with cast and scale.
#include "kernels/pack.h"
#include "kernels/cpu/isa_loops.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

template <class Source, class Target>
void pack_chunk(const Source* __restrict source, Target* __restrict target, std::int64_t count,
                float scale) {
  for (std::int64_t i = 0; i < count; ++i) {
    target[i] = from_float<Target>(pack_body(to_float(source[i]), scale));
  }
}

}  // namespace

void pack(DType source_dtype, DType target_dtype, const void* source, void* target,
          std::int64_t begin, std::int64_t count, float scale) {
  if (source_dtype == target_dtype && scale == 1.0f) {
    const std::int64_t size = size_of(source_dtype);
    memcpy(static_cast<char*>(target) + begin * size,
           static_cast<const char*>(source) + begin * size, count * size);
    return;
  }
  with_element(source_dtype, [&](auto from) {
    with_element(target_dtype, [&](auto to) {
      pack_chunk(static_cast<const decltype(from)*>(source) + begin,
                 static_cast<decltype(to)*>(target) + begin, count, scale);
    });
  });
}

}  // namespace poise::kernels::cpu::POISE_ISA
