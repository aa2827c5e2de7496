"""What the gradient noise scale says about the batch."""

from __future__ import annotations

import math

_FAR = 3.0  # within this factor of the noise scale a batch is left alone


def advice(noise_scale: float, tokens: float) -> str:
    """A line for people.

    A batch of the noise scale's size needs about twice the fewest updates and twice the fewest tokens;
    a much smaller one spends updates, a much larger one tokens. (McCandlish et al. 2018,
    arXiv:1812.06162.)

    Args:
      noise_scale: StepResult.noise_scale, in counted tokens (or samples).
      tokens: those of an update.
    """
    if math.isinf(noise_scale):
        return (
            f"gradient noise scale: beyond what updates of {tokens:,.0f} tokens can tell; a larger batch "
            "would save updates in proportion"
        )
    head = f"gradient noise scale: {noise_scale:,.0f} tokens; an update has {tokens:,.0f}"
    updates, more = 1 + noise_scale / tokens, 1 + tokens / noise_scale
    cost = f"{updates:.1f} times the fewest updates, {more:.1f} times the fewest tokens"
    if tokens * _FAR < noise_scale:
        return (
            f"{head}: {cost}; a batch up to {noise_scale / tokens:.0f} times as large saves updates"
        )
    if tokens > noise_scale * _FAR:
        return f"{head}: {cost}; a batch of a {tokens / noise_scale:.0f}th saves tokens"
    return f"{head}: {cost}; the batch is well chosen"
