// How a loss gives the open window back.
#pragma once

#include "poise/export.h"

namespace poise {

// Thrown by a loss on some ranks: all ranks drop the window. Engine::step throws it on all of them,
// nothing has changed then, and engine and group stay usable. Not a std::exception, so that
// handlers of errors let it pass.
struct POISE_API WindowDropped {};

}  // namespace poise
