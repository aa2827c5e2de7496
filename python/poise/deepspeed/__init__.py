"""The calls of a DeepSpeed script: `import poise.deepspeed as deepspeed`, and the script goes on as it is.

`from deepspeed.X import Y` becomes `from poise.deepspeed.X import Y`. docs/deepspeed.md has every key of the
JSON file and what becomes of it.
"""

from __future__ import annotations

from typing import Any

from poise import _build
from poise.deepspeed import accelerator, checkpointing, comm, monitor, ops, runtime, utils, zero
from poise.deepspeed.accelerator import get_accelerator
from poise.deepspeed.engine import DeepSpeedEngine
from poise.deepspeed.launch import add_config_arguments, init_distributed
from poise.deepspeed.start import initialize
from poise.deepspeed.utils import log_dist, logger

__version__ = _build.version  # poise's

__all__ = [
    "DeepSpeedEngine",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "runtime",
    "utils",
    "zero",
]

_ABSENT = {
    "PipelineModule": "there are no pipeline stages; zero_optimization.stage 3 shards the parameters",
    "pipe": "there are no pipeline stages; zero_optimization.stage 3 shards the parameters",
    "moe": "there are no expert-parallel ranks; the experts of a model are sharded as all parameters are",
    "init_inference": "it trains only; call the engine's module after engine.eval()",
    "tp_model_init": "there are no tensor-parallel ranks",
}


def __getattr__(name: str) -> Any:
    why = f": {_ABSENT[name]}" if name in _ABSENT else "; docs/deepspeed.md says what there is"
    raise AttributeError(f"poise.deepspeed has no {name}{why}")
