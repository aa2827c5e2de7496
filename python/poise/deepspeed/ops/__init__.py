"""Optimizers by the names that DeepSpeed scripts import."""

from __future__ import annotations

from poise.deepspeed.ops import adam, lamb, lion

__all__ = ["adam", "lamb", "lion"]
