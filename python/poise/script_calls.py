"""What scripts and subclasses of transformers' Trainer ask it besides the methods that they override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from poise import columns, trainer_data, trainer_optimizer
from poise._C import Error


class ScriptCalls:
    """Base of poise.Trainer, which has the attributes."""

    @property
    def tokenizer(self) -> Any:
        """The older name of processing_class."""
        return self.processing_class

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing is around it."""
        return self.model

    @property
    def callback_handler(self) -> Any:
        """Who has callbacks, add_callback() and pop_callback(): the Trainer."""
        return self

    @property
    def is_in_train(self) -> bool:
        """Whether train() is going on."""
        return self._run_log is not None

    @property
    def _train_batch_size(self) -> int:
        return self.args.per_device_train_batch_size

    def get_learning_rates(self) -> list[float]:
        """Of each group of the optimizer, for the next update; there is one after train() or
        create_optimizer()."""
        if self.optimizer is not None:
            return [group["lr"] for group in self.optimizer.param_groups]
        if self.engine is None:
            raise Error("[trainer] get_learning_rates() before train(): there is no optimizer yet")
        return [self.engine.learning_rate]

    def get_num_trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that weight_decay is for: matrices, not biases and norms."""
        return [name for name, p in model.named_parameters() if p.dim() >= 2]

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: Any, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class of what args.optim means, whose work the engine does, and its settings."""
        return trainer_optimizer.class_and_settings(args)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Samples of one pass; where nothing says, those of as many batches as max_steps asks for."""
        found = trainer_data.examples(dataloader)
        usual = self.args.max_steps * self.args.per_device_train_batch_size
        return usual if found is None else found

    def floating_point_ops(self, inputs: Any) -> int:
        """As the model itself says, of transformers; 0 where it does not."""
        counts = getattr(self.model, "floating_point_ops", None)
        return counts(inputs) if callable(counts) else 0

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        raise Error(
            "[trainer] hyperparameter_search: poise has none; run one Trainer after the other, each with its "
            "own arguments and model_init"
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A further model, a teacher for example."""
        model.to(device)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A dataset of the package datasets without the columns that forward does not take."""
        names = getattr(dataset, "column_names", None)
        if (
            not self.args.remove_unused_columns
            or not names
            or not hasattr(dataset, "remove_columns")
        ):
            return dataset
        unused = columns.unused(self.model, names, self.label_names)
        return dataset.remove_columns(unused) if unused else dataset

    def _get_collator_with_removed_columns(
        self, data_collator: Callable, description: str | None = None
    ) -> Callable:
        unused = self.args.remove_unused_columns
        return columns.collate_for(self.model, data_collator, None, unused, self.label_names)
