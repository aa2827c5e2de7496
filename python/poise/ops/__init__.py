"""Optimizers by the names that DeepSpeed scripts import: poise.ops.adam, lamb and lion."""

from __future__ import annotations

from poise.ops import adam, lamb, lion

__all__ = ["adam", "lamb", "lion"]
