// Models that others have saved: safetensors files, and folders as transformers writes them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "poise/core.h"
#include "poise/export.h"

namespace poise::state {

// From a parameter's or buffer's name to its name in the file.
using NameMap = std::function<std::string(const std::string& name)>;

// Fills a model, before its engine is built, from `path`: a safetensors file, or a folder with
// model.safetensors or with model.safetensors.index.json and its parts. Values are cast to the
// model's types. Every parameter must be there, in its shape; buffers that are not there stay as
// they are. Everything is checked before anything is touched; throws Error naming the file, the
// parameter, or the nearest name. Holds one tensor at a time. Returns the names in the file that no
// parameter or buffer took.
POISE_API std::vector<std::string> load_model(const ModelView& model, const std::string& path,
                                              const NameMap& name_in_file = {});

}  // namespace poise::state
