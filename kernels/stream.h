// The yardstick of the optimizer stage: the memory traffic of squared_norms() and adamw() without
// their arithmetic. Only benchmarks use it.
#pragma once

#include <cstdint>

#include "kernels/adamw.h"
#include "kernels/body.h"
#include "kernels/launch.h"
#include "poise/export.h"

namespace poise::kernels {

// Reads `numel` 4-byte words once; returns their exclusive-or, so that the read cannot be dropped.
// CPU back ends only.
POISE_API std::uint32_t stream_read(const Launch& launch, const float* array, std::int64_t numel);

// Reads gradient, master and moments, and writes master, moments and low, once each (CPU only).
POISE_API void stream_update(const Launch& launch, const AdamArrays& arrays, std::int64_t numel);

POISE_BODY AdamState stream_body(AdamState old, float gradient) {
  return AdamState{old.master + gradient, old.moment1 + gradient, old.moment2 + gradient};
}

}  // namespace poise::kernels
