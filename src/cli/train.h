// `poise train`: builds the model, the data and the engine that a Config describes and runs them.
#pragma once

#include "poise/config.h"

namespace poise::cli {

enum class Output { text, json };

// Returns the exit code; throws Error.
int train(const Config& config, Output output);

}  // namespace poise::cli
