"""A torch optimizer whose work an engine does: its groups, settings and state are the engine's.

The object stays, so that schedulers and loops that hold it go on working: before every update the
engine reads its param_groups, and its step(), zero_grad(), state_dict() and load_state_dict() act on
the engine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as _of_torch
from torch import nn

from poise import optimizer_state
from poise._C import Error, StepResult
from poise.torch_settings import check_groups, check_unchanged, fixed_options, kind_of

if TYPE_CHECKING:
    from poise.engine import Engine

logger = logging.getLogger("poise")

_TIE = "_poise_engine"  # of an optimizer that was handed over


@contextlib.contextmanager
def left_out_frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Parameters that no group holds would never change: they need no gradient either. Around what
    makes the engine: where that fails, they are as they were."""
    of_model = {id(p) for p in model.parameters()}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    foreign = [p for p in held.values() if id(p) not in of_model]
    if foreign:
        raise Error(
            f"[loop] the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is none "
            "of the model; make it from model.parameters()"
        )
    left_out = [
        (n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in held
    ]
    for _, parameter in left_out:
        parameter.requires_grad_(False)
    if left_out:
        logger.warning(
            "[loop] %d parameters of the model are in no group of the optimizer (the first is %s): "
            "they are frozen",
            len(left_out),
            left_out[0][0],
        )
    try:
        yield
    except BaseException:
        for _, parameter in left_out:
            parameter.requires_grad_(True)
        raise


class HandedOver:
    """The tie between an optimizer and the engine that does its work.

    Args:
      optimizer: its step() calls `step` from now on; its state goes to the engine.
      engine: made with torch_settings.to_settings(optimizer).
      step: closes the window, or does nothing where one is not full.
      zero_grad: what zero_grad() does; None: nothing, since gradients are zero after each update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        step: Callable[[], Any],
        zero_grad: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer, self._engine = optimizer, engine
        self._made_for = fixed_options(optimizer)
        self._names = {id(p): name for name, p in _trainable(engine.model)}
        tie, state = vars(optimizer).get(_TIE), dict(optimizer.state)
        try:
            self._take_over()
            engine.group_parameters([self._names_of(group) for group in optimizer.param_groups])
            self._give_state()
            self.give_settings()
        except BaseException:  # the optimizer stays whose it was
            setattr(optimizer, _TIE, tie)
            optimizer.state.clear()
            optimizer.state.update(state)
            raise
        self._replace_methods(step, zero_grad)

    def before_update(self) -> None:
        """The hooks of somebody's that torch runs before a step; then give_settings(), since they may change those."""
        hooks = _of_torch._global_optimizer_pre_hooks, self.optimizer._optimizer_step_pre_hooks
        self._run(hooks)
        self.give_settings()

    def after_update(self, result: StepResult) -> None:
        """Those that it runs after one: none after an update that was skipped, as behind torch's GradScaler."""
        hooks = _of_torch._global_optimizer_post_hooks, self.optimizer._optimizer_step_post_hooks
        if result.applied:
            self._run(hooks)

    def _run(self, hooks: Iterable[Mapping[int, Callable[..., Any]]]) -> None:
        for hook in [hook for some in hooks for hook in some.values()]:
            hook(self.optimizer, (self.optimizer,), {})

    def give_settings(self) -> None:
        """Learning rates and all else that a scheduler changes, for the next update; raises Error on
        an option that was set meanwhile and that the engine would not follow."""
        self._check()
        self.optimizer._opt_called = True  # what torch's schedulers ask for
        groups = self.optimizer.param_groups
        first = groups[0]
        beta1, beta2 = first.get("betas", (0.9, 0.999))
        self._engine.set_hyperparameters(
            [(float(group["lr"]), float(group["weight_decay"])) for group in groups],
            beta1=float(beta1),
            beta2=float(beta2),
            eps=1e-8 if kind_of(self.optimizer) == "adafactor" else float(first.get("eps", 1e-8)),
            momentum=float(first.get("momentum", 0.0)),
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with whole moments; all ranks."""
        optimizer_state.fill(self._engine, self.optimizer)
        state = type(self.optimizer).state_dict(self.optimizer)
        self.optimizer.state.clear()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what state_dict() of this or of a plain torch optimizer gave; all ranks."""
        groups = self.optimizer.param_groups
        try:
            type(self.optimizer).load_state_dict(self.optimizer, state)
            self._undo_casts(state)
            self._check()
            self._give_state()
        except BaseException:  # the run stays as it was
            self.optimizer.param_groups = groups
            self.optimizer.state.clear()
            raise
        self.give_settings()

    def _undo_casts(self, given: dict[str, Any]) -> None:
        """torch has moments in the type of their parameter. Here they are fp32: in fp16 the squares of small
        gradients would be zero."""
        groups = zip(self.optimizer.param_groups, given["param_groups"], strict=True)
        for group, numbers in groups:
            for parameter, number in zip(group["params"], numbers["params"], strict=True):
                held = self.optimizer.state.get(parameter, {})
                for name, value in given["state"].get(number, {}).items():
                    cast = held.get(name)
                    if isinstance(cast, torch.Tensor) and cast.dtype != value.dtype:
                        held[name] = value.to(cast.device)

    def _check(self) -> None:
        check_groups(self.optimizer)
        check_unchanged(self.optimizer, self._made_for)

    def _give_state(self) -> None:
        optimizer_state.take(self._engine, self.optimizer)
        self.optimizer.state.clear()  # the engine has it; twice would be twice the memory

    def _take_over(self) -> None:
        """What an earlier engine of the optimizer's has: a loop may be wrapped anew."""
        earlier = vars(self.optimizer).get(_TIE)
        engine = None if earlier is None else earlier()
        if engine is not None and engine is not self._engine and engine.has_model:
            optimizer_state.fill(engine, self.optimizer)
        setattr(self.optimizer, _TIE, weakref.ref(self._engine))

    def _names_of(self, group: dict[str, Any]) -> list[str]:
        return [self._names[id(p)] for p in group["params"] if p.requires_grad]

    def _replace_methods(
        self, step: Callable[[], Any], zero_grad: Callable[[], None] | None
    ) -> None:
        replaced = {
            "step": functools.partial(_step, step),
            "zero_grad": functools.partial(_zero_grad, zero_grad),
            "state_dict": lambda _: self.state_dict(),
            "load_state_dict": lambda _, state_dict: self.load_state_dict(state_dict),
            "add_param_group": _add_param_group,
        }
        for name, function in replaced.items():
            # An attribute of this object alone, as torch's schedulers do it with step().
            bound = types.MethodType(_named(function, name), self.optimizer)
            setattr(self.optimizer, name, bound)
        # torch's GradScaler leaves what it has found to an optimizer with this, where step() sees it.
        self.optimizer._step_supports_amp_scaling = True


def _named(function: Callable, name: str) -> Callable:
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    method.__name__ = name
    method._wrapped_by_lr_sched = True  # a scheduler made later must not wrap step() again
    return method


def _step(close: Callable[[], Any], optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
    if closure is not None:
        raise Error(
            "[loop] optimizer.step(closure): the closure's gradients do not reach the engine"
        )
    if getattr(optimizer, "found_inf", None) is not None:
        raise Error(
            "[loop] a GradScaler steps the optimizer, whose gradients have its scale; leave it out, or make it "
            'with enabled=False: config={"precision": {"dtype": "fp16"}} scales the loss'
        )
    close()


def _zero_grad(
    drop: Callable[[], None] | None, optimizer: torch.optim.Optimizer, set_to_none: bool = True
) -> None:
    if drop is not None:
        drop()


def _add_param_group(optimizer: torch.optim.Optimizer, param_group: Any) -> None:
    raise Error("[loop] add_param_group() after poise.wrap: add groups before it")


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
