// Copies of what others wait for.
#pragma once

#include <cstddef>

namespace poise::state {

// By as many threads as torch has. The bytes are at hand in the caches afterwards.
void copy_by_threads(char* to, const char* from, std::size_t size);

// Past the caches, where the processor can: twice as fast where memory is the limit, and what the
// training has in the caches stays there.
void copy_past_caches(char* to, const char* from, std::size_t size);
void copy_past_caches_by_threads(char* to, const char* from, std::size_t size);

}  // namespace poise::state
