// What a run is going to do, in numbers, before it does it.
#pragma once

#include <string>
#include <vector>

#include "poise/comm.h"
#include "poise/config.h"
#include "poise/core.h"
#include "poise/data.h"

namespace poise::cli {

std::vector<std::string> banner(const Config& config, const ModelView& model,
                                const data::ByteCorpus& corpus, const std::vector<bool>& recomputed,
                                const comm::Group& group);

}  // namespace poise::cli
