"""poise.Engine: one update of a torch.nn.Module from a window of micro-batches.

A thin cover over the C++ engine: it names the model's tensors, finds its units, wraps what shall be
recomputed, and turns what a loss function returns into the parts that the runtime weighs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poise import (
    _C,
    around_blocks,
    comm,
    meta,
    model_view,
    optimizer_state,
    whole_state,
    wrong_batch,
)
from poise._C import Error, LoadedState, Rehearsal, StepResult
from poise.config import ConfigLike, read_config, settings_of
from poise.loss import Count, loss_parts
from poise.model_call import call_model
from poise.ranks import numbered

LossFn = Callable[[Any], Any]
_alive: weakref.WeakSet[Engine] = weakref.WeakSet()
Parameter = str | torch.Tensor


class Engine:
    """Trains `model` by updates that are the same whatever the split of the global batch.

    The parameters keep their identity, names and shapes, but live in memory of the engine from now
    on, in the dtype of the configuration; their `.grad` stays empty (see `gradient`). Where this raises,
    the model is as it was before; of several ranks, what no rank had whole is lost, and says so.

    Args:
      model: any module with trainable parameters. One that is trained now may be frozen for some
        windows (requires_grad, the same on all ranks, changed between windows): updates then leave it
        alone, as torch's optimizers do. One that is frozen now has no state here and stays so.
      config: settings, in any form that poise.config.read_config takes.
      units: classes, class names or name patterns of the modules that belong together; None: the
        entries of the model's largest list of blocks.
      group: the ranks that train together: a poise.comm.Group or a torch.distributed process
        group, or poise.comm.hybrid(...). None: torch.distributed's default group where it is
        initialized, else one rank. zero.shard_group_size divides it as hybrid does.
        All ranks build the same model from the same settings; rank 0's values hold.
      materialize: for a model made under torch.device("meta"): sets the parameters and buffers of
        one module itself (not of its children), in place, on rank 0; called for one unit after the
        other, so that no rank ever holds a whole model that is sharded. None: the modules'
        reset_parameters().
      device: where parameters and buffers live from now on; None: where they are. A model larger
        than a GPU comes on the CPU: its units move one by one, as far as they stay there.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ConfigLike = None,
        units: model_view.UnitChoice = None,
        group: Any = None,
        materialize: meta.Materialize | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise Error(f"[engine] the model is {type(model).__name__}; give a torch.nn.Module")
        self.model = model
        self.config = read_config(config)
        with contextlib.ExitStack() as failed:  # what it closes where this raises
            self._make(model, units, group, materialize, device, failed)
            failed.pop_all()

    def _make(
        self,
        model: nn.Module,
        units: model_view.UnitChoice,
        group: Any,
        materialize: meta.Materialize | None,
        device: torch.device | str | None,
        failed: contextlib.ExitStack,
    ) -> None:
        blocks = model_view.find_units(model, units)
        fill = None
        if meta.is_meta(model):
            given = group.all if isinstance(group, comm.Ranks) else group
            device = device or meta.device_for(given)
            fill = meta.Filling(model, numbered(device), blocks, materialize)
            failed.callback(fill.undo)
        elif materialize is not None:
            raise Error(
                "[engine] materialize given, but the model's parameters have values; make the model "
                'under torch.device("meta"), or leave it out'
            )
        settings = settings_of(self.config)
        target = model_view.device_of(model) if device is None else numbered(device)
        self._came_from = whole_state.places(model, target)
        ranks = comm.ranks_for(
            group,
            target,
            settings["comm"]["timeout_seconds"],
            settings["zero"]["shard_group_size"],
        )
        self.group, self._ranks = ranks.all, ranks
        if fill is not None:
            fill.group = self.group
        if model_view.is_compiled(model) and self.shards_parameters():
            raise Error(
                "[engine] the model was compiled before the engine: at zero.stage 3 and with "
                "offload.parameters its blocks are "
                "run by the engine, which a compiled model would pass by; compile it after the "
                "engine is made, or compile the forward of its blocks"
            )
        parameters = model_view.named_parameters(model)
        self._named = parameters
        self._names = {id(parameter): name for name, parameter in reversed(parameters)}
        self._engine = _C.Engine(
            parameters,
            model_view.named_buffers(model),
            model_view.unit_parameters(model, blocks),
            self.config,
            ranks.all,
            ranks.shard,
            ranks.replica,
            fill,
            target if device is not None else None,
        )
        self._undo = contextlib.ExitStack()
        failed.callback(self.unmake)
        self._trained = {id(p) for _, p in parameters if p.requires_grad}
        self._whole = 0  # scopes of gathered() that are open
        self._blocks = blocks
        self._checkpointing = settings["checkpointing"]
        _let_go(self._names)
        around_blocks.attach(self, self._undo)
        weakref.finalize(self, self._undo.close).atexit = False
        _alive.add(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(whole_state.no_copy("an engine", "engine", "engine.model"))

    def step(
        self,
        window: Iterable[Any] | None = None,
        loss_fn: LossFn | None = None,
        *,
        counts: Sequence[float] | None = None,
        last: bool = False,
    ) -> StepResult:
        """One update.

        Args:
          window: the micro-batches of the update; without one, what `backward` accumulated is
            applied.
          loss_fn: gets a micro-batch and returns its loss (poise.loss.ALLOWED); None: the model
            itself, called with the micro-batch, returns it.
          counts: only for losses with several terms: the window's total count of the main loss and
            of each term.
          last: without a window: close it although it holds fewer micro-batches than configured.
        """
        if window is None:
            return self._engine.step(last)
        if isinstance(window, (torch.Tensor, Mapping)):
            raise Error(
                f"[engine] the window is one {type(window).__name__}; give the list of "
                "micro-batches, for example engine.step([batch], loss_fn)"
            )
        model_view.refuse_new_parameters(self.model, self._names)
        batches = list(window)
        loss_fn = loss_fn or self._call_model

        def loss(index: int) -> tuple:
            return loss_parts(loss_fn(batches[index]))

        return self._engine.step_window(len(batches), loss, [float(n) for n in counts or ()])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the precision of the configuration."""
        with self.forward_scope():
            return self.model(*args, **kwargs)

    def forward_scope(self) -> _C.ForwardScope:
        """`with engine.forward_scope():` for a forward that is not just `engine(...)`."""
        return self._engine.forward_scope()

    def backward(self, loss: Any, tokens: Count = None) -> None:
        """Accumulates the gradient of one micro-batch.

        Args:
          loss: what a loss function may return.
          tokens: how many tokens (or samples) a mean without a count of its own counted.

        Raises torch.OutOfMemoryError where memory ran out; of several ranks the one waits until the
        others come to the window's end, and all raise it: they may run the window again.
        """
        if self.micro_batches == 0:
            model_view.refuse_new_parameters(self.model, self._names)
        self._engine.backward(loss_parts(loss, tokens))

    def is_boundary(self) -> bool:
        """Whether the window holds as many micro-batches as configured: `step` is due."""
        return self._engine.is_boundary()

    def begin_window(self, counts: Sequence[float]) -> None:
        """Gives the counts of a window before its first forward: losses with several terms."""
        self._engine.begin_window([float(n) for n in counts])

    def discard_window(self) -> None:
        """Drops what was accumulated since the last step."""
        self._engine.discard_window()

    def lose_window(self, why: str) -> None:
        """Says that a forward of the open window ran out of memory here, on one of several ranks: the
        window is dropped on all of them, whose step raises torch.OutOfMemoryError. Waits until they
        come to its end; backward, and a forward at zero.stage 3, do so by themselves."""
        self._engine.lose_window(why)

    def drop_window(self) -> None:
        """Drops the open window on all ranks, whose backward, begin_update or step then raises
        poise.WindowDropped, as this call does once they have come to the window's end. The same
        from within step(window, loss_fn): a loss_fn that raises it."""
        self._engine.drop_window()

    @property
    def lost_windows(self) -> int:
        """Windows that lose_window, drop_window or a loss_fn has dropped on all ranks; of several ranks
        also the trials by which a balance is found."""
        return self._engine.lost_windows

    def begin_update(self) -> None:
        """Sums the window up, so that `gradient` can be read and written before `step`."""
        self._engine.begin_update()

    def gradient(self, parameter: Parameter) -> torch.Tensor:
        """The window's mean gradient: unscaled, unclipped, fp32; after begin_update."""
        return self._engine.gradient(self.name_of(parameter))

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clips this window's gradient to a global L2 norm, instead of optimizer.max_grad_norm of
        the configuration; between the last backward and step. Returns the norm before; all ranks."""
        return self._engine.clip_grad_norm(max_norm)

    @property
    def accumulation(self) -> int:
        """Micro-batches of the next full window on a rank: of a ramp (batch.ramp_from), by applied
        updates."""
        return self._engine.accumulation

    def set_accumulation(self, micro_batches: int) -> None:
        """Micro-batches of a full window from now on; between windows."""
        self._engine.set_accumulation(micro_batches)

    def group_parameters(self, groups: Sequence[Sequence[Parameter]]) -> None:
        """Puts every trainable parameter into a group, whose learning rate and weight decay come
        from set_hyperparameters from now on, not from configuration and schedule."""
        self._engine.group_parameters([[self.name_of(p) for p in group] for group in groups])

    def set_hyperparameters(
        self,
        groups: Sequence[tuple[float, float]],
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        momentum: float = 0.0,
    ) -> None:
        """(learning rate, weight decay) of each group and the optimizer's constants, from the next
        update on."""
        self._engine.set_hyperparameters(list(groups), beta1, beta2, eps, momentum)

    def moments(self, parameter: Parameter) -> list[torch.Tensor]:
        """The optimizer's fp32 moments of a parameter, whole; all ranks."""
        return self._engine.moments(self.name_of(parameter))

    def set_moments(self, parameter: Parameter, values: Sequence[torch.Tensor]) -> None:
        """Replaces them; all ranks, with the same values."""
        self._engine.set_moments(self.name_of(parameter), list(values))

    def set_updates(self, updates: int) -> None:
        """How many updates have been applied: what bias correction and the schedule count from."""
        self._engine.set_updates(updates)

    def missed_updates(self, parameter: Parameter) -> int:
        """How many of them were not the parameter's, which was frozen then."""
        return self._engine.missed_updates(self.name_of(parameter))

    def set_missed_updates(self, parameter: Parameter, updates: int) -> None:
        """Replaces it: a parameter's bias correction counts from its own updates."""
        self._engine.set_missed_updates(self.name_of(parameter), updates)

    def set_schedule(self, config: ConfigLike, from_update: int) -> None:
        """The schedule of the updates to come, that of `config`; it counts the updates that are
        applied after so many. Moments go on."""
        self._engine.set_schedule(read_config(config), from_update)

    def master(self, parameter: Parameter) -> torch.Tensor:
        """The fp32 values of a parameter."""
        return self._engine.master(self.name_of(parameter))

    def set_master(self, parameter: Parameter, values: torch.Tensor) -> None:
        """Replaces them; all ranks, with the same values, between windows."""
        self._engine.set_master(self.name_of(parameter), values)

    def refresh(self, parameter: Parameter) -> None:
        """Says that a parameter was edited through `.data`; other edits are noticed."""
        self._engine.refresh(self.name_of(parameter))

    @contextlib.contextmanager
    def gathered(self, writer: int | None = None) -> Iterator[None]:
        """`with engine.gathered():` all parameters are whole, at every stage: to evaluate without
        the engine, to generate, to read, to edit.

        All ranks enter and leave it, between windows; what they run inside needs no other rank.

        Args:
          writer: the rank whose values become everybody's at the end; None: values stay as they are.
        """
        scope = self._engine.gathered(writer)
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1
            scope.close()

    @contextlib.contextmanager
    def gathered_unit(self, unit: str) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """`with engine.gathered_unit(name) as parameters:` those of one unit are whole, to be read;
        all ranks, between windows. Units one after the other hold no more than one of them whole."""
        scope = self._engine.gathered_unit(unit)
        try:
            names = set(self._engine.names_in(unit))
            yield [(name, p) for name, p in self._named if name in names]
        finally:
            scope.close()

    def state_entries(self) -> dict[str, Any]:
        """The model's state_dict with the parameters themselves, whether they are whole or not."""
        self._whole += 1
        try:
            return dict(self.model.state_dict(keep_vars=True))
        finally:
            self._whole -= 1

    def give_back(self) -> None:
        """Makes the model whole and its own again; all ranks. The engine is of no more use then.

        Needed where parameters are sharded (zero.stage 3) and the model outlives the engine: what is
        left of it otherwise are shards that go with the engine.
        """
        if self.shards_parameters():
            whole_state.give_back(self, self._came_from)
        self._undo.close()
        self._engine = None

    def unmake(self) -> None:
        """Makes the model what it was before the engine, which has trained nothing: types, devices and
        values; all ranks, between windows. The engine is of no more use then."""
        self._undo.close()
        self._engine.unmake()
        self._engine = None

    @contextlib.contextmanager
    def unmade_by_failure(self) -> Iterator[None]:
        """Around what follows the making of an engine, and is of no use without it."""
        try:
            yield
        except BaseException:
            self.unmake()
            raise

    @property
    def has_model(self) -> bool:
        """Until give_back()."""
        return self._engine is not None

    def state_dict(
        self, rank: int | None = None, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """The model's state_dict with whole tensors, as copies; all ranks.

        Args:
          rank: the only one that gets it; the others an empty one, and no more whole than one unit
            at a time. None: all.
          device: of the copies; None: where the parameters are.
        """
        return whole_state.of(self, rank, device)

    def save(
        self,
        directory: str | Path,
        *,
        name: str = "",
        cursor: int | None = None,
        user: Mapping[str, str] | None = None,
        own: Mapping[str, str] | None = None,
        total_limit: int = 0,
        keep_every: int = 0,
        best: bool = False,
        extra: Callable[[str], None] | None = None,
    ) -> str:
        """Saves all that the next updates depend on as a folder that is whole or not there.

        All ranks, between windows, with the same arguments. With state.asynchronous it returns when
        all has been copied; a failure of writing then comes from the next step, save, load or
        finish_save.

        Args:
          directory: of the saves; all ranks see it.
          name: of the folder; empty: "update-00000120".
          cursor: where the data goes on.
          user: texts that every rank gets back (rank 0's are kept).
          own: texts of this rank, given back where as many ranks load.
          total_limit: saves that stay in the directory, the newest ones; 0: all.
          keep_every: saves after each n-th update stay besides; 0: none of them.
          best: the directory's link `best` leads to this save from now on; where it leads stays.
          extra: writes files of its own into the folder it gets; called on rank 0.

        Returns:
          the path of the save.
        """
        return self._engine.save(
            str(directory),
            name=name,
            cursor=cursor,
            user=dict(user or {}),
            own=dict(own or {}),
            total_limit=total_limit,
            keep_every=keep_every,
            best=best,
            extra=extra,
        )

    def export_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Fills optimizer.state, of a plain torch optimizer over the model's parameters, with the
        moments and the number of updates: optimizer.state_dict() is then torch's own. All ranks get
        whole moments. Raises Error where it is of another kind, or over other parameters.
        """
        optimizer_state.check_fits(self, optimizer)
        optimizer_state.fill(self, optimizer)

    def import_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The other way round, after optimizer.load_state_dict(...): moments and the number of
        updates become the engine's; learning rate and all else stay as its config says. All ranks,
        between windows.
        """
        optimizer_state.check_fits(self, optimizer)
        optimizer_state.take(self, optimizer)

    def rehearse_save(self, directory: str | Path) -> Rehearsal:
        """Writes a save to its end and removes it: what is wrong with the directory, or too large
        for it, comes out now. All ranks, between windows.

        Returns:
          bytes of all ranks, seconds until they were on the disk, free_bytes of the file system.
        """
        return self._engine.rehearse_save(str(directory))

    def finish_save(self) -> None:
        """Waits for a save in flight and raises what went wrong with it."""
        self._engine.finish_save()

    def load(
        self, path: str | Path, *, weights_only: bool = False, only: Sequence[str] = ()
    ) -> LoadedState:
        """Takes the state of a save, or of the latest whole one in a directory of saves.

        It may come from another number of ranks, stage, precision or division into units. All of it
        is checked before anything is touched; what does not fit is an Error that names it. All
        ranks, between windows.

        Args:
          path: of a save, or of a directory of saves.
          weights_only: parameters and buffers alone, without optimizer, counters and generators.
          only: with weights_only: names (* and ? allowed); empty: all.
        """
        return self._engine.load(str(path), weights_only=weights_only, only=list(only))

    def memory(self) -> dict[str, Any]:
        """The ledger: bytes now and at the peak, in total and by account."""
        return self._engine.memory()

    def restart_peak(self) -> None:
        """Lets the peaks of memory() start anew from what is held; a window does so by itself."""
        self._engine.restart_peak()

    def set_checkpointing(self, policy: Mapping[str, Any]) -> None:
        """Changes which blocks recompute their activations; between windows.

        Args:
          policy: as the section `checkpointing` of the configuration: {"policy": "first_m", "n": 2}.

        Raises Error in an open window and for a policy or unit that there is not; what was stays.
        """
        if self.micro_batches > 0:
            raise Error(
                f"[engine] set_checkpointing() in an open window of {self.micro_batches} "
                "micro-batches; call step() or discard_window() first"
            )
        before = self._checkpointing
        self._undo.pop_all().close()
        try:
            self._checkpointing = {**before, "n": 1, "units": [], **policy}
            around_blocks.attach(self, self._undo)
        except BaseException:
            self._undo.pop_all().close()
            self._checkpointing = before
            around_blocks.attach(self, self._undo)
            raise

    @property
    def checkpointing(self) -> dict[str, Any]:
        """Which blocks recompute their activations now."""
        return dict(self._checkpointing)

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The modules that are gathered and recomputed as one, by name, in order."""
        return list(self._blocks)

    @property
    def units(self) -> list[str]:
        """Names of the units, in canonical order."""
        return self._engine.units

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._engine.learning_rate

    @property
    def loss_scale(self) -> float:
        return self._engine.loss_scale

    @property
    def updates(self) -> int:
        """Applied updates; the schedule counts these."""
        return self._engine.updates

    @property
    def skipped_updates(self) -> int:
        return self._engine.skipped_updates

    @property
    def micro_batches(self) -> int:
        """In the open window."""
        return self._engine.micro_batches

    def name_of(self, parameter: Parameter) -> str:
        if isinstance(parameter, str):
            return model_view.plain_name(parameter)
        name = self._names.get(id(parameter))
        if name is None:
            raise Error("[engine] this tensor is no parameter of the model; give one, or its name")
        return name

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether it has gradient and moments here, frozen for now or not."""
        return id(parameter) in self._trained

    def _call_model(self, batch: Any) -> Any:
        with wrong_batch.explained(self.model, batch, room="engine"):
            return call_model(self.model, batch)

    def shards_parameters(self) -> bool:
        """Or they are offloaded: blocks run as units either way."""
        settings = settings_of(self.config)
        sharded = self.group.size if self._ranks.shard is None else self._ranks.shard.size
        offloaded = settings["offload"]["parameters"] != "none"
        return offloaded or (sharded > 1 and settings["zero"]["stage"] == 3)


def _let_go(parameters: Mapping[int, str]) -> None:
    """Takes away what older engines put around the modules of these parameters, which live in a newer one now: a
    second Trainer for a model, or a cell that is run again."""
    for older in list(_alive):
        if older.has_model and not parameters.keys().isdisjoint(older._names):
            older._undo.close()


def engine_of(parameter: torch.Tensor) -> Engine | None:
    """The engine that a parameter lives in; None: none yet."""
    return next((one for one in _alive if one.has_model and id(parameter) in one._names), None)
