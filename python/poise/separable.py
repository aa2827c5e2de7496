"""Whether another micro-batch is the same training: what a model and its loss say about it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

# Heads of transformers whose loss is a mean over tokens or samples by themselves.
HEADS = (
    "ForCausalLM",
    "LMHead",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageClassification",
)


def why_not_split(
    model: nn.Module,
    given: bool | None,
    *,
    own_loss: bool,
    came_counted: Callable[[], bool],
) -> str | None:
    """Why another micro-batch may be another training ("the model has BatchNorm layers, ..."); None: it
    is the same, as far as is known.

    Args:
      model: that is trained.
      given: what was said of its loss (separable_loss); None: nothing.
      own_loss: the model returns the loss; else other code makes it of its outputs.
      came_counted: asked where nothing else tells: whether the loss says what it is a sum or a mean over.
    """
    if given is not None:
        return None if given else "separable_loss is False"
    reason = obstacle(model)
    if reason is not None:
        return f"the model {reason}"
    if (own_loss and has_known_head(model)) or came_counted():
        return None
    whose = "the model returns" if own_loss else "the loss is"
    return (
        f"{whose} a mean without saying over how many tokens or samples, which may depend on who shares "
        "a micro-batch"
    )


def has_known_head(model: nn.Module) -> bool:
    """Whether the loss that the model itself returns is known to be a mean over tokens or samples."""
    return any(head in type(model).__name__ for head in HEADS)


def obstacle(model: nn.Module) -> str | None:
    """What in the model sees a whole micro-batch ("has BatchNorm layers, ..."), whatever its loss."""
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return "has BatchNorm layers, which see one micro-batch"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return "adds a loss that balances its experts over a micro-batch"
    return None
