"""`deepspeed.zero` of poise."""

from __future__ import annotations

from poise.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
