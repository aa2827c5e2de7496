// The directory of saves: names, the step that makes a folder a save, which one is the latest, and
// which ones go.
#pragma once

#include <cstdint>
#include <string>

#include "state/manifest.h"

namespace poise::state {

std::string default_name(std::int64_t updates);
void check_name(const std::string& name);  // throws Error where it cannot be that of a save
// Throws Error where something that is no save stands in the place of one, or of a link to one.
void check_place(const std::string& directory, const std::string& name, bool best);
std::string shard_name(int rank, int part);  // part 0, 1, ... of what it writes
std::string temporary_name(const std::string& name, const std::string& word);

// What saves left that were killed; only under the Lock.
void clear_left_overs(const std::string& directory);

// Everything in `temporary` reaches the disk, then it becomes the save `name`, the best one where
// that is asked for, and the latest one. `manifest` knows the shards' files; the others are found
// here.
void commit_folder(const std::string& directory, const std::string& temporary,
                   const std::string& name, Manifest manifest, bool best);

// Removes the oldest saves whose names begin as that of `newest` until `limit` are left; 0: none.
// The best one, and those after a multiple of `keep_every` updates (0: none), stay and do not
// count.
void rotate(const std::string& directory, const std::string& newest, std::int64_t limit,
            std::int64_t keep_every);

}  // namespace poise::state
