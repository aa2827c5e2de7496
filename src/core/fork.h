// Forks above this process. What holds locks or threads remembers the generation it was made in: in
// a child of another generation the threads are gone and a lock may be held by one of them for
// ever.
#pragma once

namespace poise {

int fork_generation();

}  // namespace poise
