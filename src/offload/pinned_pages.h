// Pages of the host that a GPU copies to and from by itself.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>

namespace poise::offload {

// Why they cannot be pinned; empty: they are.
std::string pin_pages(void* data, std::size_t bytes, c10::Device device);
// Waits for the device first: copies in flight know the pages by address alone.
void unpin_pages(void* data, c10::Device device) noexcept;

}  // namespace poise::offload
