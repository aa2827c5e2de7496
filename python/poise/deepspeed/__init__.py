"""The calls of a DeepSpeed script: `import poise as deepspeed`, and the script goes on as it is.

docs/deepspeed.md has every key of its JSON file and what becomes of it.
"""

from __future__ import annotations

from poise.deepspeed.engine import DeepSpeedEngine
from poise.deepspeed.launch import add_config_arguments, init_distributed
from poise.deepspeed.start import initialize

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize"]
