"""What torch's operators take on this CPU beside their results, while they run, and what their results really hold.

A trace without memory sees the shapes of results alone. What an operator copies, sums in or saves for its
backward depends on libraries and on the processor, so each different call is made once more for real, on zeros and
under a ledger, where its tensors are small enough; the same calls of larger micro-batches follow from those of
smaller ones.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from poise._C import Ledger

MOST_BYTES = 32 << 20  # of a call that is made for real
MOST_FLOPS = 5e8
# Operators that may be called with zeros for values: no other one is, whatever it does with them.
_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "native_", "_native_batch_norm",
    "_scaled_dot_product_flash_attention_for_cpu", "embedding_dense_backward", "_embedding_bag", "mkldnn_rnn_layer",
    "sum", "mean", "var", "std", "prod", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "sort", "topk",
    "_softmax", "_log_softmax", "_safe_softmax", "mse_loss", "smooth_l1_loss", "huber_loss", "nll_loss",
    "binary_cross_entropy", "gather", "scatter", "index", "_index", "_unsafe_index", "upsample_", "max_pool",
    "avg_pool", "adaptive_", "_adaptive_", "reflection_pad", "replication_pad", "grid_sampler",
)  # fmt: skip

Bytes = tuple[int, ...]  # inside a call, and of each result beyond its shape


class Inside:
    """Bytes of calls. One may serve many traces of a model, smaller micro-batches first.

    Attributes:
      missed: calls that were too large to be made, with nothing known of smaller ones.
    """

    def __init__(self) -> None:
        self.missed = 0
        self._found: dict[Hashable, Bytes] = {}
        self._ways: dict[Hashable, dict[Hashable, dict[int, Bytes]]] = {}
        self.begin(None, 1)

    def begin(self, way: Hashable, samples: int) -> None:
        """A trace of so many samples, which makes the calls that others of the same `way` made."""
        self._places = self._ways.setdefault(way, {})  # by place and operator: by samples
        self._samples, self._place = samples, 0

    def of(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor],
        flops: float,
    ) -> Bytes:
        """Beside the call's results at its highest, and beyond the shape of each; empty: nothing."""
        self._place += 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not _may_take(func, inputs, outputs):
            return ()
        known = self._places.setdefault((self._place, func), {})
        key = (
            func,
            torch.is_grad_enabled(),
            *(_key(leaf) for leaf in tree_leaves((args, sorted(kwargs.items())))),
        )
        found = self._found.get(key)
        if found is None:
            if flops > MOST_FLOPS or sum(map(_held, (*inputs, *outputs))) > MOST_BYTES:
                return self._followed(known)
            found = self._found[key] = _measured(func, args, kwargs, outputs)
        known[self._samples] = found
        return found

    def _followed(self, known: dict[int, Bytes]) -> Bytes:
        """On the lines through the two largest micro-batches whose call was made, and no less than there."""
        if not known:
            self.missed += 1
            return ()
        *smaller, high = sorted(known)
        low = smaller[-1] if smaller else 0
        below = known[low] if smaller else (0,) * len(known[high])
        share = (self._samples - high) / max(1, high - low)
        return tuple(
            more + max(0, round((more - less) * share))
            for less, more in itertools.zip_longest(below, known[high], fillvalue=0)
        )


def _may_take(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    if not inputs or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.pointwise in func.tags and not func.overloadpacket.__name__.startswith(_NAMES):
        # Operands of several types are cast first, and some kernels want them laid out alike.
        types = {tensor.dtype for tensor in (*inputs, *outputs) if tensor.dim() > 0}
        return len(types) > 1 or not all(tensor.is_contiguous() for tensor in inputs)
    return func.overloadpacket.__name__.startswith(_NAMES)


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype)
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def _held(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _measured(
    func: Any, args: tuple, kwargs: dict[str, Any], outputs: Sequence[torch.Tensor]
) -> Bytes:
    with _alone():
        try:
            args, kwargs = tree_map_only(torch.Tensor, _zeros, (args, kwargs))
            if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
                args = (*args[:-1], _workspace(args))
            with Ledger() as ledger:
                result = func(*args, **kwargs)
            books = ledger.snapshot()
        except Exception:  # it wants other values than zeros, or has no kernel for a CPU
            return ()
    real = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    # A workspace that backward does not need is left out, the last one.
    beyond = [_held(one) - _held(shape) for one, shape in zip(real, outputs, strict=False)]
    return (max(0, books.peak_bytes - books.current_bytes), *beyond)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without a trace's modes and autocast. Whether gradients are wanted stays: some operators look."""
    with _disable_current_modes(), torch._C._DisableAutocast():
        yield


def _zeros(like: torch.Tensor) -> torch.Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    room = torch.zeros(reach + 1 if like.numel() > 0 else 0, dtype=like.dtype)
    return room.as_strided(like.shape, like.stride())


def _workspace(args: tuple) -> torch.Tensor:
    """Which a recurrent layer's backward reads as its library laid it out, made by its forward."""
    inputs, weights, states, rest = args[0], args[1:5], args[5:7], args[13:-1]
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first = rest
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer(
            inputs, *weights, *states, reverse, sizes, mode, hidden, layers, biases, both, batch_first, train
        )[3]  # fmt: skip
