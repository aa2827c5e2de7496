"""Methods of transformers' Trainer that poise's does not call: a subclass that has one would train or evaluate
otherwise than it says."""

from __future__ import annotations

from typing import Any

from poise._C import Error

_EVALUATION = (
    "give preprocess_logits_for_metrics and compute_metrics, or override compute_loss or evaluate"
)
_ORDER = "override get_train_dataloader or get_eval_dataloader, or set train_sampling_strategy"
_LOOP = "override training_step, or give a callback"
_SAVING = "override save_model, or give a callback with on_save"
_UNUSED = {
    "prediction_step": _EVALUATION,
    "evaluation_loop": _EVALUATION,
    "prediction_loop": _EVALUATION,
    "_get_train_sampler": _ORDER,
    "_get_eval_sampler": _ORDER,
    "_inner_training_loop": _LOOP,
    "_maybe_log_save_evaluate": _LOOP,
    "get_batch_samples": _LOOP,
    "_save": _SAVING,
    "_save_checkpoint": _SAVING,
    "_load_from_checkpoint": "give resume_from_checkpoint a checkpoint of poise",
    "get_decay_parameter_names": "override create_optimizer",
    "create_accelerator_and_postprocess": "poise.TrainingArguments says how ranks work together",
}


def refuse(trainer: Any) -> None:
    """Raises Error where its class has one of them, or the object, on which scripts set them too."""
    kind = type(trainer)
    for name, advice in _UNUSED.items():
        method = getattr(kind, name, None)
        own = method is not None and not method.__module__.startswith("poise.")
        if own or name in vars(trainer):
            raise Error(
                f"[trainer] {kind.__name__} has {name}(), which transformers' Trainer calls and poise's does "
                f"not; {advice}"
            )
