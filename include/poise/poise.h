// The names a trainer needs, in one include.
#pragma once

#include "poise/config.h"
#include "poise/core.h"
#include "poise/engine.h"
#include "poise/error.h"
#include "poise/memory.h"
