// Streaming stores: a line is written without being read first.
#include "state/fast_copy.h"

#include <ATen/Parallel.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace poise::state {
namespace {

template <class Copy>
void by_threads(char* to, const char* from, std::size_t size, Copy copy) {
  constexpr std::int64_t kGrain = std::int64_t{1} << 20;
  at::parallel_for(0, static_cast<std::int64_t>(size), kGrain, [&](auto begin, auto end) {
    copy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

void copy_by_threads(char* to, const char* from, std::size_t size) {
  by_threads(to, from, size, [](char* t, const char* f, std::size_t n) { std::memcpy(t, f, n); });
}

void copy_past_caches(char* to, const char* from, std::size_t size) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64, kWord = sizeof(__m128i);
  const auto beyond = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const auto head = std::min(size, beyond == 0 ? 0 : kLine - beyond);
  std::memcpy(to, from, head);
  const auto lines_end = head + (size - head) / kLine * kLine;
  for (auto line = head; line < lines_end; line += kLine) {
    __m128i words[kLine / kWord];
    for (std::size_t i = 0; i < kLine / kWord; ++i) {
      words[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + line + kWord * i));
    }
    for (std::size_t i = 0; i < kLine / kWord; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + line + kWord * i), words[i]);
    }
  }
  _mm_sfence();
  std::memcpy(to + lines_end, from + lines_end, size - lines_end);
#else
  std::memcpy(to, from, size);
#endif
}

void copy_past_caches_by_threads(char* to, const char* from, std::size_t size) {
  by_threads(to, from, size, copy_past_caches);
}

}  // namespace poise::state
