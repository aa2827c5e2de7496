// What a run is going to do, in numbers, before it does it.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "poise/config.h"
#include "poise/core.h"
#include "poise/data.h"

namespace poise::cli {

std::vector<std::string> banner(const Config& config, const ModelView& model,
                                const data::ByteCorpus& corpus, const std::vector<bool>& recomputed,
                                c10::Device device);

}  // namespace poise::cli
