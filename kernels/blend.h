// The moving average that optimizers keep of a gradient.
#pragma once

#include "kernels/body.h"

namespace poise::kernels {

// a + weight x (b - a), from the nearer end: exact at both ends, and without the drift that
// separately rounded beta and 1 - beta cause over many steps.
POISE_BODY float blend(float moment, float value, float beta, float rest) {
  const bool near_moment = rest < 0.5f;
  const float start = near_moment ? moment : value;
  const float stop = near_moment ? value : moment;
  return start + (near_moment ? rest : beta) * (stop - start);
}

}  // namespace poise::kernels
