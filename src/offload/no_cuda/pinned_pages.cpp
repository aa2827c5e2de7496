// Twin of cuda/pinned_pages.cpp in builds without CUDA.
#include "offload/pinned_pages.h"

namespace poise::offload {

std::string pin_pages(void*, std::size_t, c10::Device) { return "this build has no CUDA"; }
void unpin_pages(void*, c10::Device) noexcept {}

}  // namespace poise::offload
