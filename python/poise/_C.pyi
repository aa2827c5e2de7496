"""
The C++ core of poise. Use the package poise; this module follows it without notice.
"""

from __future__ import annotations
import collections.abc

class Bug(RuntimeError): ...
class Error(RuntimeError): ...
class WindowDropped(BaseException): ...

import torch
import torch.distributed.distributed_c10d
import typing

__all__: list[str] = [
    "AccountBlock",
    "ActivationScope",
    "Bug",
    "ByteCorpus",
    "Config",
    "Engine",
    "Error",
    "EverythingRecomputed",
    "FileStore",
    "ForwardScope",
    "GatheredScope",
    "Group",
    "Ledger",
    "LoadedState",
    "OffloadSpan",
    "OffloadTransfer",
    "OptimizerFlats",
    "Permutation",
    "Place",
    "PlanAnswer",
    "PlanFound",
    "PlanJob",
    "PlanLever",
    "PlanLink",
    "PlanTraced",
    "Rehearsal",
    "RunPrediction",
    "Sampler",
    "Snapshot",
    "StepResult",
    "Unit",
    "WindowDropped",
    "WindowLoader",
    "budget_text",
    "chunked_cross_entropy",
    "cli_run",
    "cpu_isa",
    "cuda_snapshot",
    "export_save",
    "fake_group",
    "find_save",
    "format_bytes",
    "from_environment",
    "from_process_group",
    "gpu_reserve",
    "known_devices",
    "list_saves",
    "log_write",
    "mark_best_save",
    "one_rank",
    "optimizer_stage",
    "parse_bytes",
    "place_from_environment",
    "plan_cost",
    "plan_levers",
    "plan_misfit",
    "plan_moments",
    "plan_page",
    "plan_search",
    "plan_settings",
    "plan_what_helps",
    "predict_runs",
    "ranks_from_environment",
    "read_model",
    "recompute",
    "recomputed_units",
    "recomputing",
    "reset_cuda_peak",
    "save_differences",
    "schedule_multiplier",
    "set_log_level",
    "stream_pass",
    "verify_save",
    "without_memory",
]

class OptimizerFlats:
    def __init__(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moment1: torch.Tensor,
        moment2: torch.Tensor,
        low: torch.Tensor | None = None,
    ) -> None: ...

class Permutation:
    """
    Pseudo-random permutation of range(n), any position read alone.
    """
    def __call__(self, position: typing.SupportsInt) -> int: ...
    def __init__(
        self, n: typing.SupportsInt, seed: typing.SupportsInt, epoch: typing.SupportsInt = 0
    ) -> None: ...
    def __len__(self) -> int: ...

class Sampler:
    """
    Sample indices of a rank for the window at a global sample index.
    """
    def __init__(
        self,
        n: typing.SupportsInt,
        *,
        seed: typing.SupportsInt = 42,
        shuffle: bool = True,
        run_on: bool = False,
        ranks: typing.SupportsInt = 1,
        rank: typing.SupportsInt = 0,
    ) -> None: ...
    def __len__(self) -> int: ...
    def advance(self, cursor: typing.SupportsInt, count: typing.SupportsInt) -> int: ...
    def indices(self, cursor: typing.SupportsInt, count: typing.SupportsInt) -> list[int]: ...

class ByteCorpus:
    """
    Files read as one row of bytes or tokens, mapped.
    """
    def __init__(
        self,
        paths: collections.abc.Sequence[str],
        sequence_length: typing.SupportsInt,
        suffix: str = "",
        element: str = "byte",
    ) -> None: ...
    def __len__(self) -> int: ...
    def batch(
        self, indices: collections.abc.Sequence[typing.SupportsInt]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def sample(self, index: typing.SupportsInt) -> tuple[torch.Tensor, torch.Tensor]: ...
    def split(self, fraction: typing.SupportsFloat) -> tuple[ByteCorpus, ByteCorpus]: ...
    @property
    def elements(self) -> int: ...
    @property
    def files(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...

class WindowLoader:
    """
    Windows of a corpus, read ahead on a C++ thread.
    """
    def __init__(
        self,
        corpus: ByteCorpus,
        micro_batch_size: typing.SupportsInt,
        accumulation: typing.SupportsInt = 1,
        *,
        seed: typing.SupportsInt = 42,
        shuffle: bool = True,
        run_on: bool = False,
        epochs: typing.SupportsInt = 0,
        prefetch: typing.SupportsInt = 2,
        ranks: typing.SupportsInt = 1,
        rank: typing.SupportsInt = 0,
    ) -> None: ...
    def __iter__(self) -> typing.Any: ...
    def __next__(self) -> list[tuple[torch.Tensor, torch.Tensor]]: ...
    def seek(self, cursor: typing.SupportsInt) -> None: ...
    def set_accumulation(self, micro_batches: typing.SupportsInt) -> None: ...
    @property
    def cursor(self) -> int: ...
    @property
    def window_samples(self) -> int: ...

class Snapshot:
    """
    Bytes held now and at the peak, in total and by account.
    """
    def __repr__(self) -> str: ...
    @property
    def at_peak(self) -> dict[str, int]:
        """
        By account at the total peak; sums to peak_bytes.
        """
    @property
    def current(self) -> dict[str, int]:
        """
        By account, now.
        """
    @property
    def current_bytes(self) -> int:
        """
        Bytes held now.
        """
    @property
    def own_peak(self) -> dict[str, int]:
        """
        Each account's own highest.
        """
    @property
    def peak_bytes(self) -> int:
        """
        Highest total since reset_peak().
        """

class AccountBlock:
    """
    A with-block whose allocations go to one account of a ledger.
    """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, *args) -> None: ...

class Ledger:
    """
    Counts the CPU tensors that this thread makes inside `with ledger:`.

    budget: bytes, or a text such as "64MiB"; None means no limit. Above it
    an allocation raises torch.OutOfMemoryError and the process goes on.
    """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, *args) -> None: ...
    def __init__(self, budget: typing.SupportsInt | str | None = None) -> None: ...
    def account(self, name: str) -> AccountBlock:
        """
        A with-block whose allocations go to this account.
        """
    def make_default(self) -> None:
        """
        Threads outside any with-block count here too, under "other".
        """
    def reset_peak(self) -> None:
        """
        Peaks start anew from what is held.
        """
    def snapshot(self) -> Snapshot:
        """
        The figures of this moment.
        """
    @property
    def budget(self) -> int:
        """
        Bytes, 0 for no limit; a text such as "64MiB" may be assigned.
        """
    @budget.setter
    def budget(self, arg1: typing.SupportsInt | str | None) -> None: ...

class OffloadTransfer:
    """
    A put or fetch on its way.
    """
    def wait(self) -> None:
        """
        Raises what failed.
        """

class OffloadSpan:
    """
    Elements in a store, one-dimensional.
    """
    def fetch(self, begin: typing.SupportsInt, to: torch.Tensor) -> OffloadTransfer:
        """
        Elements from `begin` on, on their way into a tensor that nobody touches meanwhile.
        """
    def put(self, begin: typing.SupportsInt, values: torch.Tensor) -> OffloadTransfer:
        """
        The other way.
        """

class FileStore:
    """
    Spans in a file without a name.
    """
    def __init__(
        self,
        directory: str,
        queue_depth: typing.SupportsInt = 8,
        block_bytes: typing.SupportsInt = 1048576,
        threads: bool = False,
    ) -> None: ...
    def reserve(self, numel: typing.SupportsInt, dtype: torch.dtype) -> OffloadSpan: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...

class Group:
    """
    This rank's end of a group of ranks.

    A failure of any rank ends the group: what waits, and every later call,
    raises poise.Error with its message.
    """
    def abort(self, message: str) -> None:
        """
        Ends the group on every rank with this message.
        """
    def all_gather_bytes(self, data: bytes, what: str = "bytes") -> list[bytes]:
        """
        Each rank's bytes, by rank.
        """
    def all_gather_text(self, text: str, what: str = "text") -> list[str]:
        """
        Each rank's text, by rank.
        """
    def barrier(self, what: str = "barrier") -> None:
        """
        Returns when every rank has called it. `what` names it in errors.
        """
    def check(self) -> None:
        """
        Raises the group's failure, if there is one.
        """
    def leave_note(self, key: str, text: str) -> None:
        """
        A short text for the other ranks, beside the collectives, at any time.
        """
    def note(self, key: str) -> str | None:
        """
        What a rank left under this key last; None: nothing yet.
        """
    def reset_traffic(self) -> None:
        """
        Counts from zero.
        """
    def traffic(self) -> dict[str, dict[str, int]]:
        """
        Calls and bytes sent in theory since the last reset_traffic(), by kind
        of collective.
        """
    @property
    def backend(self) -> str:
        """
        "one rank", "gloo", "nccl" or "fake".
        """
    @property
    def device(self) -> torch.device:
        """
        Where its tensors live.
        """
    @property
    def rank(self) -> int:
        """
        Of this process, from 0.
        """
    @property
    def size(self) -> int:
        """
        Number of ranks.
        """

class Place:
    """
    What a launcher said of this process.
    """
    @property
    def address(self) -> str: ...
    @property
    def local_rank(self) -> int | None: ...
    @property
    def port(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def store_runs(self) -> bool: ...

class _Packed:
    pass

class EverythingRecomputed(BaseException):
    pass

class Config:
    """
    The settings of a run, checked once and read-only.
    """

    __hash__: typing.ClassVar[None] = None
    @staticmethod
    def from_json(
        text: str, overrides: collections.abc.Sequence[str] = [], place: str = ""
    ) -> Config:
        """
        Reads JSON; comments are allowed. Overrides are "key=value" each, applied after it; messages name the place of the text. Raises poise.Error on what it does not know.
        """
    @staticmethod
    def from_json_file(path: str, overrides: collections.abc.Sequence[str] = []) -> Config: ...
    def __eq__(self, arg0: Config) -> bool: ...
    def __repr__(self) -> str: ...
    def to_json(self) -> str:
        """
        Every key with its value.
        """

class LoadedState:
    """
    What a load brings back besides the engine's own state.
    """
    def __repr__(self) -> str: ...
    @property
    def cursor(self) -> int | None: ...
    @property
    def own(self) -> dict[str, str]: ...
    @property
    def path(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def user(self) -> dict[str, str]: ...

class Rehearsal:
    """
    What a save would take.
    """
    @property
    def bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class PlanLink:
    """
    One step of a model's forward: embedding, block or head.
    """
    def __init__(
        self,
        name: str,
        flat: typing.SupportsInt,
        block: bool,
        kept: collections.abc.Sequence[typing.SupportsInt],
        recomputed: collections.abc.Sequence[typing.SupportsInt],
        flops: typing.SupportsFloat,
        moved: typing.SupportsFloat,
        away: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt]] = [],
    ) -> None: ...
    @property
    def flops(self) -> float: ...
    @property
    def name(self) -> str: ...

class PlanTraced:
    """
    A model's chain at several micro-batches.
    """
    def __init__(
        self,
        flats: collections.abc.Sequence[
            tuple[str, typing.SupportsInt, typing.SupportsInt, typing.SupportsInt]
        ],
        rest: typing.SupportsInt,
        micro_batches: collections.abc.Sequence[typing.SupportsInt],
        links: collections.abc.Sequence[collections.abc.Sequence[PlanLink]],
    ) -> None: ...

class PlanFound:
    """
    One way to run an update and what it takes.
    """
    @property
    def accumulation(self) -> int: ...
    @property
    def at_peak(self) -> dict[str, int]: ...
    @property
    def build_bytes(self) -> int: ...
    @property
    def held(self) -> dict[str, int]: ...
    @property
    def keep_gathered(self) -> bool: ...
    @property
    def loss_chunk_tokens(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def offload(self) -> dict[str, str]: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def peak_moment(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def recomputed(self) -> list[bool]: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def selective(self) -> bool: ...
    @property
    def shard_ranks(self) -> int: ...
    @property
    def stage(self) -> int: ...

class PlanLever:
    """
    What else would lower the need.
    """
    @property
    def changes_numbers(self) -> bool: ...
    @property
    def fits(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def plan(self) -> PlanFound: ...
    @property
    def setting(self) -> str: ...

class PlanAnswer:
    """
    What the search found.
    """
    @property
    def best(self) -> PlanFound: ...
    @property
    def budget(self) -> int: ...
    @property
    def candidates(self) -> int: ...
    @property
    def dominated_by(self) -> str: ...
    @property
    def fits(self) -> bool: ...
    @property
    def floor(self) -> int: ...
    @property
    def front(self) -> list[PlanFound]: ...
    @property
    def runner_up(self) -> PlanFound | None: ...
    @property
    def why(self) -> str: ...

class PlanJob:
    """
    What is to be planned.
    """
    def __init__(self) -> None: ...
    def compute_in(self, arg0: str, arg1: str) -> None: ...
    def describe(self, arg0: str) -> None: ...
    def may_offload(
        self, arg0: collections.abc.Sequence[collections.abc.Sequence[str]]
    ) -> None: ...
    def optimize_with(
        self, type: str, momentum: typing.SupportsFloat = 0.0, moments: str = "fp32"
    ) -> None: ...
    def recompute(self, blocks: collections.abc.Sequence[bool]) -> None:
        """
        These blocks, instead of a search for the best ones.
        """
    def run_on(
        self,
        gpus: str,
        per_node: typing.SupportsInt = 0,
        nodes: typing.SupportsInt = 0,
        node_link: typing.SupportsFloat = 0,
        network: typing.SupportsFloat = 0,
        machine: str = "",
    ) -> None:
        """
        As `poise plan` reads them; links in GB/s.
        """
    def run_on_this_cpu(self) -> None:
        """
        Operators of a CPU take what they take here.
        """
    def trace(self, arg0: str, arg1: PlanTraced) -> None: ...
    @property
    def budget(self) -> int: ...
    @budget.setter
    def budget(self, arg0: typing.SupportsInt) -> None: ...
    @property
    def for_cpus(self) -> bool:
        """
        Whether its devices are CPUs.
        """
    @property
    def global_batch(self) -> int: ...
    @global_batch.setter
    def global_batch(self, arg0: typing.SupportsInt) -> None: ...
    @property
    def micro_batch(self) -> int: ...
    @micro_batch.setter
    def micro_batch(self, arg0: typing.SupportsInt) -> None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @sequence.setter
    def sequence(self, arg0: typing.SupportsInt) -> None: ...
    @property
    def shard_ranks(self) -> list[int]: ...
    @shard_ranks.setter
    def shard_ranks(self, arg0: collections.abc.Sequence[typing.SupportsInt]) -> None: ...
    @property
    def stages(self) -> list[int]: ...
    @stages.setter
    def stages(self, arg0: collections.abc.Sequence[typing.SupportsInt]) -> None: ...

class RunPrediction:
    """
    What a published run of another framework holds and how fast it is, predicted.
    """
    @property
    def device_constant(self) -> float:
        """
        In tokens_per_second.
        """
    @property
    def id(self) -> str: ...
    @property
    def meter_offset_gib(self) -> float:
        """
        In peak_gib: what the meter counts beside the allocator.
        """
    @property
    def peak_gib(self) -> float:
        """
        Of each device, as the run's meter reads it.
        """
    @property
    def predicted(self) -> bool:
        """
        Whether its row gives enough to predict from.
        """
    @property
    def tokens_per_second(self) -> float:
        """
        Of each device.
        """

class StepResult:
    """
    What one update did.
    """
    def __repr__(self) -> str: ...
    @property
    def accounts(self) -> dict: ...
    @property
    def applied(self) -> bool: ...
    @property
    def backward_seconds(self) -> float: ...
    @property
    def clipped_norm(self) -> float: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def first_bad_parameter(self) -> str: ...
    @property
    def forward_seconds(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def noise_scale(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def status(self) -> typing.Any: ...
    @property
    def tokens(self) -> float: ...
    @property
    def total_seconds(self) -> float: ...
    @property
    def update_seconds(self) -> float: ...
    @property
    def updates(self) -> int: ...

class ForwardScope:
    """
    A `with` block that a forward runs in.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...

class ActivationScope:
    """
    A `with` block whose saved tensors wait away from the device.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, *args) -> None: ...

class Unit:
    """
    Runs a block while its parameters are whole.
    """
    def abandon(self) -> None: ...
    def enter(self, inputs: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def leave(self, outputs: collections.abc.Sequence[torch.Tensor]) -> None: ...

class GatheredScope:
    """
    All parameters are whole until close().
    """
    def close(self) -> None: ...

class Engine:
    """
    The C++ engine; use poise.Engine.
    """
    def __init__(
        self,
        parameters: collections.abc.Sequence[tuple[str, torch.Tensor]],
        buffers: collections.abc.Sequence[tuple[str, torch.Tensor]],
        units: collections.abc.Sequence[tuple[str, collections.abc.Sequence[str]]],
        config: Config,
        all: Group = None,
        shard: Group = None,
        replica: Group = None,
        materialize: collections.abc.Callable | None = None,
        device: torch.device | None = None,
    ) -> None: ...
    def activation_scope(self) -> ActivationScope: ...
    def backward(self, loss: tuple) -> None: ...
    def begin_update(self) -> None: ...
    def begin_window(self, counts: collections.abc.Sequence[typing.SupportsFloat]) -> None: ...
    def clip_grad_norm(self, max_norm: typing.SupportsFloat) -> float: ...
    def discard_window(self) -> None: ...
    def drop_window(self) -> None: ...
    def finish_save(self) -> None: ...
    def forward_scope(self) -> ForwardScope: ...
    def gathered(self, writer: typing.SupportsInt | None) -> GatheredScope: ...
    def gathered_unit(self, unit: str) -> GatheredScope: ...
    def gradient(self, name: str) -> torch.Tensor: ...
    def group_parameters(
        self, groups: collections.abc.Sequence[collections.abc.Sequence[str]]
    ) -> None: ...
    def is_boundary(self) -> bool: ...
    def load(
        self, path: str, *, weights_only: bool = False, only: collections.abc.Sequence[str] = []
    ) -> LoadedState: ...
    def lose_window(self, why: str) -> None: ...
    def master(self, name: str) -> torch.Tensor: ...
    def memory(self) -> dict: ...
    def missed_updates(self, name: str) -> int: ...
    def moments(self, name: str) -> list[torch.Tensor]: ...
    def names_in(self, unit: str) -> list[str]: ...
    def refresh(self, name: str) -> None: ...
    def rehearse_save(self, directory: str) -> Rehearsal: ...
    def restart_peak(self) -> None: ...
    def save(
        self,
        directory: str,
        *,
        name: str = "",
        cursor: typing.SupportsInt | None = None,
        user: collections.abc.Mapping[str, str] = {},
        own: collections.abc.Mapping[str, str] = {},
        total_limit: typing.SupportsInt = 0,
        keep_every: typing.SupportsInt = 0,
        best: bool = False,
        extra: collections.abc.Callable | None = None,
    ) -> str: ...
    def set_accumulation(self, micro_batches: typing.SupportsInt) -> None: ...
    def set_hyperparameters(
        self,
        groups: collections.abc.Sequence[tuple[typing.SupportsFloat, typing.SupportsFloat]],
        beta1: typing.SupportsFloat,
        beta2: typing.SupportsFloat,
        eps: typing.SupportsFloat,
        momentum: typing.SupportsFloat,
    ) -> None: ...
    def set_master(self, name: str, values: torch.Tensor) -> None: ...
    def set_missed_updates(self, name: str, updates: typing.SupportsInt) -> None: ...
    def set_moments(self, name: str, values: collections.abc.Sequence[torch.Tensor]) -> None: ...
    def set_schedule(self, config: Config, from_update: typing.SupportsInt) -> None: ...
    def set_updates(self, updates: typing.SupportsInt) -> None: ...
    def step(self, last: bool = False) -> StepResult: ...
    def step_window(
        self,
        count: typing.SupportsInt,
        loss: collections.abc.Callable,
        counts: collections.abc.Sequence[typing.SupportsFloat] = [],
    ) -> StepResult: ...
    def unit(self, name: str) -> Unit: ...
    def unmake(self) -> None: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def config(self) -> Config: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def lost_windows(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def skipped_updates(self) -> int: ...
    @property
    def units(self) -> list[str]: ...
    @property
    def updates(self) -> int: ...

def budget_text(bytes: typing.SupportsInt) -> str:
    """
    At least so many bytes, as budgets are given: "1.24MiB".
    """

def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk_tokens: typing.SupportsInt,
    ignore_index: typing.SupportsInt,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    (sum of losses, counted rows) of two-dimensional hidden; see poise.chunked_cross_entropy.
    """

def cli_run(arguments: collections.abc.Sequence[str]) -> int:
    """
    Runs `poise <arguments>` (the first is the program's name) and returns the exit code.
    """

def cpu_isa() -> str:
    """
    Instruction set of the CPU kernels (POISE_CPU_ISA forces one).
    """

def cuda_snapshot(device: typing.SupportsInt = 0) -> Snapshot:
    """
    A GPU's figures from torch's caching allocator, all under "other".
    """

def export_save(save: str, file: str) -> None:
    """
    The model of a save as one plain safetensors file.
    """

def fake_group(rank: typing.SupportsInt, size: typing.SupportsInt, device: torch.device) -> Group:
    """
    A rank of a world that is not there.
    """

def find_save(path: str) -> str:
    """
    The save itself, or the latest whole one of a directory; empty: there is none.
    """

def format_bytes(bytes: typing.SupportsInt) -> str:
    """
    A number of bytes for people: "1.50 GiB".
    """

def from_environment(timeout: typing.SupportsFloat) -> Group:
    """
    The group that torchrun, Slurm or mpirun started this process for.
    """

def from_process_group(
    group: torch.distributed.distributed_c10d.ProcessGroup,
    device: torch.device,
    timeout: typing.SupportsFloat,
    names: collections.abc.Sequence[typing.SupportsInt] = [],
    owned: bool = False,
) -> Group:
    """
    Around a process group of torch.distributed.
    """

def gpu_reserve(memory: typing.SupportsInt) -> int:
    """
    Bytes of a GPU's memory that a plan leaves to its context and libraries, and to blocks that the allocator cannot join.
    """

def known_devices() -> list:
    """
    Name, memory (bytes) and peak FLOP/s, in 16 bits and in fp32, of the devices that `poise plan` knows.
    """

def list_saves(directory: str) -> list[str]:
    """
    Whole saves in a directory, oldest first.
    """

def log_write(level: typing.SupportsInt, line: str) -> None:
    """
    Writes one line to the runtime's log (0 debug, 1 info, 2 warning, 3 error).
    """

def mark_best_save(
    save: str,
    user: collections.abc.Mapping[str, str],
    total_limit: typing.SupportsInt,
    keep_every: typing.SupportsInt,
) -> None:
    """
    The directory's link `best` leads to the save, which keeps these texts besides its own.
    """

def one_rank(device: torch.device) -> Group:
    """
    A group of this process alone.
    """

def optimizer_stage(
    flats: OptimizerFlats,
    ranges: torch.Tensor,
    step: typing.SupportsInt,
    lr: typing.SupportsFloat,
    beta1: typing.SupportsFloat,
    beta2: typing.SupportsFloat,
    eps: typing.SupportsFloat,
    weight_decay: typing.SupportsFloat,
    max_norm: typing.SupportsFloat,
    scale: typing.SupportsFloat = 1.0,
) -> float:
    """
    Norm, finite check, clip and AdamW over the segments [begin, end) in the rows of `ranges` (int64, n x 2); returns the norm.
    """

def parse_bytes(text: str) -> int:
    """
    "20GiB", "1.5GB" or "1048576" as a number of bytes.
    """

def place_from_environment() -> Place | None:
    """
    What torchrun, Slurm or mpirun said; None: started by hand.
    """

def plan_cost(
    found: PlanFound,
    tokens: typing.SupportsFloat,
    gpu_hour: typing.SupportsFloat,
    utilisation: typing.SupportsFloat,
) -> tuple[float, float]: ...
def plan_levers(job: PlanJob) -> list[PlanLever]: ...
def plan_misfit(job: PlanJob, answer: PlanAnswer) -> str:
    """
    What to say where nothing fits: the floor, what most of it is, the nearest budget that works, and what else would help.
    """

def plan_moments(job: PlanJob, found: PlanFound) -> list[tuple[str, dict[str, int]]]:
    """
    Every moment of an update and its bytes by account.
    """

def plan_page(
    job: PlanJob,
    answer: PlanAnswer,
    levers: collections.abc.Sequence[PlanLever],
    gpu_hour: typing.SupportsFloat,
    utilisation: typing.SupportsFloat,
    units: collections.abc.Sequence[str],
) -> str:
    """
    The answer as one HTML page.
    """

def plan_search(job: PlanJob) -> PlanAnswer: ...
def plan_settings(found: PlanFound, units: collections.abc.Sequence[str]) -> str:
    """
    The keys of a run.json that follow a plan, as JSON.
    """

def plan_what_helps(job: PlanJob) -> str:
    """
    The levers that would fit, each with what it would need.
    """

def predict_runs(table: str) -> list[RunPrediction]:
    """
    Predictions for the rows of a comma-separated table (docs/planner_scores.md).
    """

def ranks_from_environment(
    shard_size: typing.SupportsInt, timeout: typing.SupportsFloat
) -> tuple[Group, Group, Group]:
    """
    All of them, those that this one shards with, and its equals in the other groups.
    """

def read_model(save: str, frozen: bool = True) -> list[tuple[str, torch.Tensor]]:
    """
    The model of a save by name, on the CPU and in fp32.
    """

def recompute(
    first: collections.abc.Callable,
    again: collections.abc.Callable,
    inputs: collections.abc.Sequence[torch.Tensor],
    buffers: collections.abc.Sequence[torch.Tensor],
) -> typing.Any:
    """
    Calls first() now and again(inputs) in backward; poise.checkpointing.recompute is the door.
    """

def recomputed_units(
    policy: str,
    n: typing.SupportsInt,
    patterns: collections.abc.Sequence[str],
    units: collections.abc.Sequence[str],
) -> list[bool]:
    """
    One flag for each unit: whether the policy recomputes it.
    """

def recomputing() -> bool:
    """
    Whether this thread is inside the second run of a region.
    """

def reset_cuda_peak(device: typing.SupportsInt = 0) -> None:
    """
    The GPU's peak starts anew.
    """

def save_differences(save: str, other: str) -> list[str]:
    """
    A line for each thing in which two saves differ.
    """

def schedule_multiplier(config: Config, applied: typing.SupportsInt) -> float:
    """
    Part of the peak learning rate for the update that follows so many applied ones.
    """

def set_log_level(level: str) -> None:
    """
    Drops log lines below level: debug, info, warning or error.
    """

def stream_pass(flats: OptimizerFlats) -> int:
    """
    The memory traffic of optimizer_stage without its arithmetic.
    """

def verify_save(save: str) -> None:
    """
    Reads every byte of a save; an Error names what is damaged.
    """

def without_memory(like: torch.Tensor, device: torch.device, message: str) -> torch.Tensor:
    """
    A tensor like another one, with an empty storage.
    """
