// `poise train`: builds the model, the data and the engine that a Config describes and runs them.
#pragma once

#include "poise/config.h"

namespace poise::cli {

enum class Output { text, json, nothing };  // nothing: ranks other than 0

// Returns the exit code; throws Error.
int train(const Config& config, Output output);

}  // namespace poise::cli
