"""Whether another micro-batch is the same training: what a model and its loss say about it."""

from __future__ import annotations

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
UNCOUNTED = (
    "a mean without saying over how many tokens or samples, which may depend on who shares a "
    "micro-batch"
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
