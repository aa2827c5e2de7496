// A save that turns out to be the best one after it was made.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "poise/export.h"

namespace poise::state {

// The link `best` of its directory leads to `save`, and `user` stands among its texts. Only its
// manifest is written anew, in one step. Then old saves go, as in SaveOptions. By one process;
// throws Error where the directory or the save does not let it.
POISE_API void mark_best(const std::string& save, const std::map<std::string, std::string>& user,
                         std::int64_t total_limit, std::int64_t keep_every);

}  // namespace poise::state
