// The torch type that a config's dtype names.
#pragma once

#include <c10/core/ScalarType.h>

#include "poise/config.h"
#include "poise/error.h"

namespace poise {

inline c10::ScalarType scalar_type(config::DType dtype) {
  switch (dtype) {
    case config::DType::fp32:
      return c10::ScalarType::Float;
    case config::DType::bf16:
      return c10::ScalarType::BFloat16;
    case config::DType::fp16:
      return c10::ScalarType::Half;
  }
  POISE_CHECK(false, "unknown dtype ", static_cast<int>(dtype));
  return c10::ScalarType::Float;
}

}  // namespace poise
