// The thread's position in the books, without the copy that AccountScope::current() makes.
#pragma once

#include "poise/memory.h"

namespace poise::memory {

const AccountScope::Position& current_position();
// That of AutogradScope.
AccountScope::Position autograd_position();

}  // namespace poise::memory
