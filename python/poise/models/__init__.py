"""Models to start from."""

from poise.models.byte_gpt import ByteGPT

__all__ = ["ByteGPT"]
