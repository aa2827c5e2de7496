"""Arguments of transformers' Trainer that have no meaning here: refused, with what does the same."""

from __future__ import annotations

from typing import Any

from poise._C import Error


def refuse(processing_class: Any, optimizers: tuple[Any, Any]) -> None:
    """Raises Error where one of them is given."""
    if processing_class is not None:
        raise Error(
            f"[trainer] processing_class is {type(processing_class).__name__}: a Trainer saves "
            "nothing yet that it would belong to; to pad batches with it give data_collator"
        )
    given = [type(part).__name__ for part in optimizers if part is not None]
    if given:
        raise Error(
            f"[trainer] optimizers has {' and '.join(given)}: the engine owns parameters, masters "
            "and moments and updates them in kernels of its own, which a torch optimizer cannot; "
            "choose with optim, learning_rate, weight_decay and lr_scheduler_type of "
            "TrainingArguments"
        )
