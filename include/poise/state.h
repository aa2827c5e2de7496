// Saved states: a directory per save that is whole or not there, and loads on any number of ranks,
// stage, unit layout and precision without a conversion. docs/state_format.md says what is in one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "poise/export.h"

namespace poise::state {

struct SaveOptions {
  std::string name = {};  // of the save, a folder in the directory; empty: "update-00000120"
  std::optional<std::int64_t> cursor = {};       // where the data goes on
  std::map<std::string, std::string> user = {};  // rank 0's: every rank gets it back
  std::map<std::string, std::string> own = {};   // this rank's, given back where as many ranks load
  std::int64_t total_limit = 0;  // saves that stay in the directory, the newest ones; 0: all
  std::int64_t keep_every = 0;   // those after each n-th update stay besides; 0: none of them
  bool best = false;  // the link `best` leads to this one from now on; where it leads stays besides
  // Rank 0: writes files of its own into the save's folder; they are whole with it.
  std::function<void(const std::string& folder)> extra = {};
};

struct LoadOptions {
  bool weights_only = false;  // parameters and buffers alone: the run starts anew from them
  std::vector<std::string> only = {};  // with weights_only: names (* and ? allowed); empty: all
};

// What a load brings back besides the engine's own state.
struct Loaded {
  std::string path = {};  // of the save
  int ranks = 1;          // that saved it
  std::optional<std::int64_t> cursor = {};
  std::map<std::string, std::string> user = {};
  std::map<std::string, std::string> own = {};  // empty where another number of ranks saved it
};

// What a save would take, tried out before it is needed.
struct Rehearsal {
  std::int64_t bytes = 0;       // of all ranks
  double seconds = 0;           // until they were on the disk
  std::int64_t free_bytes = 0;  // of the file system, with the rehearsal removed
};

// The save to load for `path`: a save itself, or the latest whole one in a directory of saves;
// empty: there is none. Saves that were not finished are no saves.
POISE_API std::string find(const std::string& path);

// Saves in a directory, in the order in which they were made.
POISE_API std::vector<std::string> list(const std::string& directory);

// Reads every byte of a save and checks it; throws Error naming what is damaged.
POISE_API void verify(const std::string& save);

// What a save holds, line by line, for people.
POISE_API std::vector<std::string> describe(const std::string& save);

// A line for each thing in which two saves differ, of parameters by how much; empty: they hold the
// same state.
POISE_API std::vector<std::string> differences(const std::string& save, const std::string& other);

// One plain safetensors file with the model's own names (ties under each), shapes and types. Holds
// one parameter at a time.
POISE_API void export_model(const std::string& save, const std::string& file);

// The same in memory and in fp32: masters as they are, other floating tensors widened. A tie is one
// tensor under each of its names.
enum class Frozen { included, left_out };
POISE_API std::vector<std::pair<std::string, at::Tensor>> read_model(
    const std::string& save, Frozen frozen = Frozen::included);

}  // namespace poise::state
