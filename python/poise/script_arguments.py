"""What scripts ask transformers' TrainingArguments besides its fields."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

from poise import ranks


class ParallelMode(Enum):
    """As transformers calls it."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"


class ScriptArguments:
    """Base of poise.TrainingArguments, which has the fields."""

    @property
    def device(self) -> torch.device:
        return ranks.device(self.use_cpu)

    @property
    def n_gpu(self) -> int:
        """GPUs of this rank: one, or none."""
        return int(self.device.type == "cuda")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return ranks.here().size

    @property
    def process_index(self) -> int:
        """This rank, from 0."""
        return ranks.here().rank

    @property
    def local_process_index(self) -> int:
        """This rank among those of its machine."""
        return ranks.here().local or 0

    @property
    def should_log(self) -> bool:
        """Whether this is the rank that logs."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this is the rank that writes."""
        return self.process_index == 0

    @property
    def parallel_mode(self) -> Any:
        """Of transformers' enum where the script has that, so that its members compare equal."""
        theirs = sys.modules.get("transformers.training_args")
        modes = ParallelMode if theirs is None else theirs.ParallelMode
        return modes.DISTRIBUTED if self.world_size > 1 else modes.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """Samples of a micro-batch on this rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of a batch of an evaluation on this rank."""
        return self.per_device_eval_batch_size

    def get_process_log_level(self) -> int:
        """Of Python's logging: log_level on the first rank, log_level_replica on the others."""
        name = self.log_level if self.process_index == 0 else self.log_level_replica
        return int(getattr(logging, str(name).upper(), logging.WARNING))

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Updates of the warm-up in a run of so many."""
        given = self.warmup_steps
        return int(given) if given >= 1 else math.ceil(num_training_steps * given)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """The first rank (of each machine, where `local`) runs what is inside before the others do, so that
        they find its files; all ranks."""
        if self.world_size == 1:
            yield
            return
        group = ranks.join(self.device, self.ddp_backend, self.ddp_timeout)
        first = (self.local_process_index if local else self.process_index) == 0
        if not first:
            group.barrier(f"main_process_first: {desc}")
        try:
            yield
        finally:
            if first:
                group.barrier(f"main_process_first: {desc}")
