"""Samples of what a model says while it trains: poise.Samples, a callback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from poise import generators
from poise._C import Error
from poise.callbacks import TrainerCallback
from poise.engine import engine_of
from poise.evaluation import eval_mode

logger = logging.getLogger("poise")


class Samples(TrainerCallback):
    """Goes into a Trainer's callbacks. Texts are shown, and stand in metrics.jsonl and in the report.

    The training is the same with and without it: random streams, modes and parameters are left as they
    were. At every zero_stage the model is whole while it is asked.

    Args:
      prompts: texts for model.generate() and the Trainer's processing_class; or a function that gets
        the model, in eval mode and without gradients, and returns a text or several: for any model.
      every: updates; None: after each evaluation.
      generate_with: arguments of generate(); None: 40 new tokens, the likeliest ones.
    """

    def __init__(
        self,
        prompts: Sequence[str] | Callable[[nn.Module], str | Sequence[str]],
        every: int | None = None,
        generate_with: Mapping[str, Any] | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise Error(f"[trainer] Samples every {every} updates; give 1 or more, or None")
        self._prompts = [prompts] if isinstance(prompts, str) else prompts
        self._every = every
        self._generate_with = {"max_new_tokens": 40, "do_sample": False, **(generate_with or {})}

    def on_step_end(self, args, state, control, **details) -> None:
        if self._every is not None and state.global_step % self._every == 0:
            self._sample(**details)

    def on_evaluate(self, args, state, control, **details) -> None:
        if self._every is None:
            self._sample(**details)

    def _sample(self, model, run_log=None, processing_class=None, **details) -> None:
        engine, random = engine_of(next(model.parameters())), generators.Snapshot()
        if engine is None or run_log is None:  # an evaluation outside of a run
            return
        try:
            with engine.gathered(), eval_mode(model), torch.no_grad():
                texts = self._texts(model, processing_class)
        finally:
            random.restore()
        run_log.samples([texts] if isinstance(texts, str) else list(texts))

    def _texts(self, model: nn.Module, words: Any) -> str | Sequence[str]:
        if callable(self._prompts):
            return self._prompts(model)
        if not hasattr(model, "generate") or words is None:
            lacking = "processing_class" if words is None else "generate()"
            raise Error(
                f"[trainer] Samples of prompts, but there is no {lacking}; give a function of the model "
                "instead of prompts"
            )
        device = next(model.parameters()).device
        texts = []
        for prompt in self._prompts:
            given = words(prompt, return_tensors="pt").to(device)
            texts.append(words.decode(model.generate(**given, **self._generate_with)[0]))
        return texts
