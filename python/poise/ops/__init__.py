"""Optimizers by the names that DeepSpeed scripts import: poise.ops.adam."""

from __future__ import annotations

from poise.ops import adam

__all__ = ["adam"]
