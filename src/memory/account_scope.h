// The thread's position in the books, without the copy that AccountScope::current() makes.
#pragma once

#include "poise/memory.h"

namespace poise::memory {

const AccountScope::Position& current_position();
// That of AutogradScope, on this GPU.
AccountScope::Position autograd_position(c10::DeviceIndex device);

}  // namespace poise::memory
