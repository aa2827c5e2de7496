"""poise trains the model you have on the memory you have; C++ core, Python interface."""

from __future__ import annotations

import torch as _torch  # first: it loads the libraries that the extension is linked with

from poise import _build
from poise._torch_check import check_torch as _check_torch

_check_torch(
    _build.torch_version,
    str(_torch.__version__),
    built_with_cuda=_build.with_cuda,
    running_cuda=_torch.version.cuda,
)

from poise import accelerator, checkpointing, comm, data, memory, ops, zero  # noqa: E402  (after the check)
from poise._C import Bug, Config, Error, StepResult, WindowDropped  # noqa: E402
from poise.callbacks import TrainerCallback  # noqa: E402
from poise.checkpointing import chunked_cross_entropy  # noqa: E402
from poise.deepspeed import (  # noqa: E402
    DeepSpeedEngine,
    add_config_arguments,
    init_distributed,
    initialize,
)
from poise.engine import Engine  # noqa: E402
from poise.loss import Loss, Term  # noqa: E402
from poise.own_loop import wrap  # noqa: E402
from poise.planning import plan  # noqa: E402
from poise.prediction import EvalPrediction, PredictionOutput  # noqa: E402
from poise.samples import Samples  # noqa: E402
from poise.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments  # noqa: E402
from poise.status import Status  # noqa: E402
from poise.thin_faces import (  # noqa: E402
    ActivationCheckpoint,
    GradientAccumulationSystem,
    MixedPrecisionTrainer,
    ZeROOptimizer,
)
from poise.trainer import Trainer, TrainOutput  # noqa: E402
from poise.training_arguments import TrainingArguments  # noqa: E402

__version__ = _build.version

__all__ = [
    "ActivationCheckpoint",
    "Bug",
    "Config",
    "DeepSpeedEngine",
    "Engine",
    "Error",
    "EvalPrediction",
    "GradientAccumulationSystem",
    "Loss",
    "MixedPrecisionTrainer",
    "PredictionOutput",
    "Samples",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Status",
    "StepResult",
    "Term",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "WindowDropped",
    "ZeROOptimizer",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "chunked_cross_entropy",
    "comm",
    "data",
    "init_distributed",
    "initialize",
    "memory",
    "ops",
    "plan",
    "wrap",
    "zero",
]
