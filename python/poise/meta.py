"""Models made under torch.device("meta"): parameters get memory unit by unit, as the engine takes them.

with torch.device("meta"):
    model = Large()
engine = poise.Engine(model, config)  # or materialize=a function that fills one module

At zero.stage 3 no rank holds more of the model than its shard and the units that are on their way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from poise import _C, ranks
from poise._C import Error, Group

Materialize = Callable[[nn.Module], None]
RESETS = ("reset_parameters", "_reset_parameters")


def is_meta(model: nn.Module) -> bool:
    """Whether some parameter has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def device_for(group: Group | dist.ProcessGroup | None) -> torch.device:
    """Where the parameters of a model without memory shall live."""
    if isinstance(group, Group):
        return group.device
    if group is not None or (dist.is_available() and dist.is_initialized()):
        # By kind of device: init_process_group() without a name has no one backend ("undefined").
        if "nccl" in str(dist.get_backend_config(group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    chosen = torch.get_default_device()
    return ranks.device() if chosen.type in ("cpu", "meta") else chosen


def reset(module: nn.Module) -> None:
    """The module's own way to its first values; raises Error where it has none."""
    method = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
    if method is None:
        raise Error(
            f"[engine] {type(module).__name__} has parameters or buffers on the meta device and no "
            "reset_parameters(); give poise.Engine materialize=, which fills those of one module"
        )
    method()


class Filling:
    """Gives a meta model's tensors memory and values, one unit at a time.

    Parameters stay the same objects. Until its unit is filled a parameter has a size and no memory.

    Args:
      model: changed at once: buffers get memory, parameters their device.
      device: where to.
      blocks: the modules that are units, by name.
      materialize: sets parameters and buffers of one module itself, not of its children, in place;
        None: reset.

    Attributes:
      group: told where the function fails: it runs on rank 0 alone.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        blocks: list[tuple[str, nn.Module]],
        materialize: Materialize | None = None,
    ) -> None:
        self._fill_module = materialize or reset
        self._model = model
        self._were_meta: list[
            tuple[nn.Parameter, nn.Parameter]
        ] = []  # what they are, what they were
        self._meta_buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = {name: list(_with_parameters(block)) for name, block in blocks}
        inside = {id(m) for modules in self._modules.values() for m in modules}
        self._modules["rest"] = [m for m in _with_parameters(model) if id(m) not in inside]
        self.group: Group | None = None
        try:
            self._hollow_out(device)
        except BaseException:
            self.undo()
            raise

    def _hollow_out(self, device: torch.device) -> None:
        model = self._model
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta:
                made = _hollow(name, parameter, device)
                _swap(parameter, made)
                self._were_meta.append((parameter, made))
        given = [module for module in model.modules() if self._give_buffers(module, device)]
        for module in given:
            if not _own_parameters(module):
                self._fill(module)

    def undo(self) -> None:
        """The model is on the meta device again: an engine could not be made of it."""
        for parameter, was in self._were_meta:
            with contextlib.suppress(
                RuntimeError
            ):  # somebody holds it: it stays, and has no memory
                torch.utils.swap_tensors(parameter, was)
        for module, name, was in self._meta_buffers:
            module._buffers[name] = was
        self._were_meta, self._meta_buffers = [], []

    def __call__(self, unit: str) -> None:
        """Fills a unit's parameters, which the engine takes next."""
        try:
            to_fill = []
            for module in self._modules[unit]:
                hollow = [p for p in _own_parameters(module) if _is_hollow(p)]
                for parameter in hollow:
                    _give_memory(parameter)
                if hollow:
                    to_fill.append(module)
            for module in to_fill:
                self._fill(module)
        except BaseException as error:
            if self.group is not None and self.group.size > 1:
                self.group.abort(f"{type(error).__name__}: {error}")
            raise

    def _give_buffers(self, module: nn.Module, device: torch.device) -> bool:
        """Whether there were any without memory."""
        buffers = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in buffers.items():
            self._meta_buffers.append((module, name, buffer))
            module._buffers[name] = torch.empty_like(buffer, device=device)
            _mark_unset(module._buffers[name])
        return bool(buffers)

    def _fill(self, module: nn.Module) -> None:
        tensors = {**module._parameters, **module._buffers}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        with torch.no_grad():
            self._fill_module(module)
        for name, tensor in tensors.items():
            now = module._parameters.get(name, module._buffers.get(name))
            whole = f"{self._names[id(module)]}.{name}".lstrip(".")
            if isinstance(tensor, nn.Parameter) and now is not tensor:
                raise Error(
                    f"[engine] materialize put a new parameter in the place of '{whole}'; fill the "
                    "one that is there, in place"
                )
            if now.is_meta or _is_unset(now):
                raise Error(
                    f"[engine] '{whole}' has no values after materialize ran for its module, "
                    f"{type(module).__name__}; set all parameters and buffers of the module there"
                )


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _with_parameters(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if _own_parameters(module))


def _hollow(name: str, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter as it is, on the device, its storage of 0 bytes."""
    data = _C.without_memory(
        parameter.detach(),
        device,
        f"[engine] parameter '{name}' has no memory yet: it gets it when its unit is filled; "
        "materialize sets parameters of its own module only",
    )
    made = nn.Parameter(data, parameter.requires_grad)
    made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    return made


def _swap(parameter: nn.Parameter, made: nn.Parameter) -> None:
    """The same object, so that ties and references of the user's hold."""
    try:
        torch.utils.swap_tensors(parameter, made)
    except RuntimeError as error:
        raise Error(
            "[engine] a parameter on the meta device is in use already (a graph or a weak reference "
            f"holds it): {error}; make the engine before anything else uses the model"
        ) from None


def _is_hollow(parameter: torch.Tensor) -> bool:
    return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0


def _give_memory(parameter: nn.Parameter) -> None:
    size, stride = parameter.size(), parameter.stride()
    parameter.data = torch.empty_strided(
        size, stride, dtype=parameter.dtype, device=parameter.device
    )
    _mark_unset(parameter)


def _mark_unset(tensor: torch.Tensor) -> None:
    """What nobody sets is noticed afterwards; types without a NaN cannot be told apart."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        else:
            tensor.zero_()


def _is_unset(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(tensor.detach().isnan().any())
