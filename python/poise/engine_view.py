"""What a callback sees of the engine's optimizer and schedule, where no torch optimizer was given: rates
and settings by torch's names, to be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from poise._C import Error
from poise.config import settings_of
from poise.engine import Engine


def optimizer(given: Any, engine: Engine | None) -> Any:
    """The given one, else a view of the engine's, None before there is one."""
    return given if given is not None or engine is None else EngineOptimizer(engine)


def scheduler(given: Any, given_optimizer: Any, engine: Engine | None) -> Any:
    """The given one, else a view of the engine's schedule; a given optimizer may have none."""
    if given is not None or given_optimizer is not None or engine is None:
        return given
    return EngineScheduler(engine)


class EngineOptimizer:
    """Has param_groups as a torch optimizer, with the present rate, to be read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[Group]:
        trained = [p for p in self._engine.model.parameters() if p.requires_grad]
        settings = dict(settings_of(self._engine.config)["optimizer"])
        settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
        return [Group({**settings, "lr": self._engine.learning_rate, "params": trained})]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the engine's optimizer has no {name} to read; {_GIVE}")


class EngineScheduler:
    """Has get_last_lr() as a torch scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        return [self._engine.learning_rate]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the engine's schedule has no {name} to read; {_GIVE}")


class Group(Mapping):
    """A parameter group; writing into it raises poise.Error."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise Error(
            f"[trainer] a callback set {name} of the engine's optimizer to {value}; {_GIVE}"
        )


_GIVE = "give optimizers=(a torch optimizer, None), whose groups the engine goes by"
