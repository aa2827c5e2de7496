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

from poise import checkpointing  # noqa: E402  (after the check)
from poise._C import Bug, Error  # noqa: E402
from poise.checkpointing import chunked_cross_entropy  # noqa: E402

__version__ = _build.version

__all__ = ["Bug", "Error", "__version__", "checkpointing", "chunked_cross_entropy"]
