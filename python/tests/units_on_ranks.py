"""One rank of test_unit_uses.py: `units_on_ranks.py CASE FOLDER`, started by rank_processes.

Models that use their blocks in every way that a forward may; what a user's code may do around them.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import poise
import rank_processes
import torch
import torch.distributed as dist
import torch.nn.functional as F
from poise import trainer_saving
from tiny_models import VOCABULARY, WIDTH, Block, TinyForCausalLM, batch, counted, tiny
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_on_ranks import FP32, STAGES, config_of, digest, masters_of, trained, windows_of

UPDATES = 3


# What a block gets and gives is no plain tensor.


@dataclasses.dataclass
class Parts:
    hidden: torch.Tensor
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: torch.Tensor


class Box:
    """A class of the user's own, which nobody knows."""

    def __init__(self, hidden):
        self.hidden = hidden


PACKS = {
    "dataclass": (lambda h: Parts(h, "note"), lambda p: p.hidden),
    "frozen dataclass": (Frozen, lambda p: p.hidden),
    "named tuple": (lambda h: Pair(h, h.detach()), lambda p: p.hidden),
    "dictionary": (lambda h: {"a": [{"hidden": h}]}, lambda p: p["a"][0]["hidden"]),
    "ordered dictionary": (lambda h: OrderedDict(hidden=h), lambda p: p["hidden"]),
    "nested dataclass": (lambda h: {"x": (Parts(h),)}, lambda p: p["x"][0].hidden),
    "object": (Box, lambda p: p.hidden),
}


class PackedBlock(Block):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, packed):
        pack, unpack = PACKS[self.kind]
        return pack(super().forward(unpack(packed)))


class Packed(TinyForCausalLM):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(PackedBlock(kind) for _ in range(2))

    def logits(self, input_ids):
        pack, unpack = PACKS[self.kind]
        packed = pack(self.embedding(input_ids))
        for block in self.blocks:
            packed = block(packed)
        return self.head(unpack(packed))


class NotedBlock(Block):
    def forward(self, hidden, notes):
        notes["blocks"] = notes.get("blocks", 0) + 1
        notes["hidden"] = notes["hidden"] + super().forward(hidden)
        return hidden + notes["hidden"]


class Noted(TinyForCausalLM):
    """Blocks write into a dictionary that they are handed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NotedBlock() for _ in range(2))

    def logits(self, input_ids):
        hidden = self.embedding(input_ids)
        notes = {"hidden": hidden * 0.5, "first": hidden}
        for block in self.blocks:
            hidden = block(hidden, notes)
        assert notes["blocks"] == 2
        return self.head(hidden + notes["hidden"] + notes["first"])


# Parameters and calls.


class TiedOutside(TinyForCausalLM):
    """A weight of the second block is used again outside of the blocks, before and after them."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.before.weight = self.blocks[1].up.weight

    def logits(self, input_ids):
        hidden = self.embedding(input_ids)
        hidden = hidden + self.before(hidden)[..., :WIDTH]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + self.before(hidden)[..., WIDTH:])


class TiedBlocks(TinyForCausalLM):
    """Two blocks share a weight."""

    def __init__(self):
        super().__init__(layers=3)
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Detached(TinyForCausalLM):
    """One block's result is not differentiated, another's is not used, a third has no gradient."""

    def __init__(self):
        super().__init__(layers=4)

    def logits(self, input_ids):
        hidden = self.embedding(input_ids)
        hidden = hidden + self.blocks[0](hidden).detach()
        self.blocks[1](hidden)
        with torch.no_grad():
            side = self.blocks[2](hidden)
        return self.head(self.blocks[3](hidden) + side)


class Checkpointed(TinyForCausalLM):
    """torch's own checkpoint around single blocks, around two of them, and around some again."""

    def __init__(self, reentrant):
        super().__init__(layers=4)
        self.reentrant = reentrant

    def logits(self, input_ids):
        def run(function, hidden):
            return checkpoint(function, hidden, use_reentrant=self.reentrant)

        blocks = self.blocks
        hidden = run(blocks[0], self.embedding(input_ids))
        hidden = run(lambda h: blocks[2](blocks[1](h)), hidden)
        hidden = run(lambda h: blocks[3](blocks[0](h)), hidden)
        return self.head(blocks[3](hidden))


class CheckpointedInside(TinyForCausalLM):
    """Each block recomputes a part of itself, whose parameters it uses outside of that, too."""

    class OfTwo(Block):
        reentrant = False

        def forward(self, hidden):
            part = checkpoint(lambda h: self.up(self.norm(h)), hidden, use_reentrant=self.reentrant)
            return hidden + self.down(F.gelu(part + self.up(hidden)))

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(self.OfTwo() for _ in range(2))
        for block in self.blocks:
            block.reentrant = reentrant


class ViewedBlock(Block):
    def forward(self, hidden):
        return super().forward(hidden)[None].squeeze(0)


class ChangedInPlace(TinyForCausalLM):
    """What a block gives is a view, and is changed in place outside: by itself, through another view, in a part."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ViewedBlock() for _ in range(3))

    def logits(self, input_ids):
        first = self.embedding(input_ids)
        hidden = self.blocks[0](first).add_(first)
        hidden = self.blocks[1](hidden)
        hidden.unsqueeze(0).squeeze(0).add_(first)
        hidden = self.blocks[2](hidden)
        hidden[..., :4].mul_(0.5)
        return self.head(hidden)


class Aside(TinyForCausalLM):
    """Blocks leave a term of the loss in an attribute of theirs, made before and after the rest of them."""

    class OfTwo(Block):
        first = False

        def forward(self, hidden):
            if self.first:
                self.term = self.up(hidden).square().mean()
            output = super().forward(hidden)
            if not self.first:
                self.term = self.up(output).square().mean()
            return output

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.OfTwo() for _ in range(3))
        self.blocks[1].first = True

    def forward(self, input_ids, labels):
        loss = super().forward(input_ids, labels)
        return loss + 0.1 * sum(block.term for block in self.blocks)


class Hooked(TinyForCausalLM):
    """Hooks of the user's on blocks."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)
        self.blocks[1].register_full_backward_hook(lambda module, before, after: (before[0] * 2,))


def with_frozen_norms(model):
    for block in model.blocks:
        block.norm.requires_grad_(False)
    return model


MODELS = {
    **{f"packed: {kind}": (lambda kind=kind: Packed(kind)) for kind in PACKS},
    "notes": Noted,
    "tied outside": TiedOutside,
    "tied blocks": TiedBlocks,
    "detached": Detached,
    "checkpoint": lambda: Checkpointed(False),
    "checkpoint, reentrant": lambda: Checkpointed(True),
    "checkpoint inside": lambda: CheckpointedInside(False),
    "checkpoint inside, reentrant": lambda: CheckpointedInside(True),
    "changed in place": ChangedInPlace,
    "a term aside": Aside,
    "frozen norms": lambda: with_frozen_norms(CheckpointedInside(False)),
    "frozen norms, reentrant": lambda: with_frozen_norms(CheckpointedInside(True)),
    "hooks": Hooked,
}


def made(name):
    torch.manual_seed(7)
    return MODELS[name]()


def uses(folder):
    seen, masters = {}, {}
    windows = windows_of([2, 2], UPDATES)
    for name in MODELS:
        for stage in STAGES:
            key = f"{name}, {stage}"
            seen[key], masters[key] = trained(made(name), windows, config_of(FP32, stage, 2))
    return seen, masters


# Gradients that come when those of their unit have gone (in a second round), and a rank without a
# micro-batch that must take part in it.
LATE = ("checkpoint, reentrant", "checkpoint inside, reentrant")
UNEVEN = ([2, 0], [0, 2], [3, 1])


def late(folder):
    seen, masters = {}, {}
    for name in LATE:
        for stage in (0, 1, 2):
            for counts in UNEVEN:
                key = f"{name}, {stage}, {counts}"
                config = config_of(FP32, stage)
                windows = windows_of(counts, UPDATES)
                seen[key], masters[key] = trained(made(name), windows, config)
    return seen, masters


def gradient_hooks(folder):
    """What a hook on a parameter makes of its gradient, and of another one's."""
    seen = {}
    for stage in STAGES:
        norms = []
        for factor in (1, 3):
            model = tiny()
            model.blocks[1].up.weight.register_hook(lambda g, factor=factor: g * factor)
            engine = poise.Engine(model, config_of(FP32, stage, 2))
            for piece in windows_of([2, 2], 1)[0][dist.get_rank()]:
                engine.backward(engine(**piece), counted(piece))
            engine.begin_update()
            weights = (model.blocks[1].up.weight, model.blocks[0].up.weight)
            norms.append([float(engine.gradient(weight).norm()) for weight in weights])
        seen[str(stage)] = [three / one for one, three in zip(*norms, strict=True)]
    return seen


# A part of the loss that counts on one rank only.


class TwoHeads(TinyForCausalLM):
    """Both heads are units; rows with their own labels train the second one."""

    def __init__(self):
        super().__init__()
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def losses(self, input_ids, labels, use_second):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        first = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        wanted = labels if use_second else torch.full_like(labels, -100)
        second = F.cross_entropy(self.second(hidden).flatten(0, 1), wanted.flatten())
        return first, second, (labels != -100).sum().item(), (wanted != -100).sum().item()


def parts(folder):
    """In every micro-batch the second term counts on rank (number of the micro-batch) % 2 only."""
    seen = {}
    rank = dist.get_rank()
    for stage in STAGES:
        torch.manual_seed(3)
        model = TwoHeads()
        engine = poise.Engine(model, config_of(FP32, stage, 2), units=[Block, "second"])
        numbers = []
        for window in windows_of([2, 2], UPDATES):
            seconds = [(r + i) % 2 == 0 for r in range(2) for i in range(2)]
            every = [(p["labels"] != -100).sum().item() for of_rank in window for p in of_rank]
            counts = [sum(every), sum(n for n, used in zip(every, seconds, strict=True) if used)]

            def loss(item, model=model):
                piece, used = item
                first, second, n, m = model.losses(**piece, use_second=used)
                return poise.Loss(first, n, terms=[poise.loss.Term(second, m, weight=0.5)])

            mine = list(zip(window[rank], seconds[2 * rank : 2 * rank + 2], strict=True))
            result = engine.step(mine, loss, counts=counts)
            numbers.append([result.loss, result.grad_norm, str(result.status)])
        seen[str(stage)] = [numbers, digest(masters_of(engine))]
    return seen


# Code of the user's around the engine.


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def copies(folder):
    """Copies and pickles of a model that is gathered, of one that is not, and what they may do."""
    seen = {}
    ids = batch(2, 8, seed=1)
    for stage in STAGES:
        model = tiny()
        engine = poise.Engine(model, config_of(FP32, stage, 2))
        with torch.no_grad(), engine.forward_scope():
            expected = float(model(**ids))
        with engine.gathered():
            copied = copy.deepcopy(model)
            pickled = pickle.dumps(model)
            whole = io.BytesIO()
            torch.save(model, whole)
        released = message_of(lambda model=model: copy.deepcopy(model))
        whole.seek(0)
        for one in (copied, pickle.loads(pickled), torch.load(whole, weights_only=False)):
            with torch.no_grad():
                assert float(one(**ids)) == expected
            assert digest(one.state_dict()) == digest(engine.state_dict())
            one(**ids).backward()  # a model of its own: torch's gradients
            assert all(p.grad is not None for p in one.parameters())
        assert all(p.grad is None for p in model.parameters())
        seen[str(stage)] = released
    return seen


class Written(nn.Sequential):
    """Many equal units; writes itself as models of transformers do."""

    def __init__(self):
        super().__init__(*(nn.Linear(64, 64) for _ in range(16)))
        self.register_buffer("scale", torch.tensor(3.0))

    def save_pretrained(self, folder, state_dict):
        torch.save(state_dict, Path(folder) / "written.pt")


class Doubling(Written):
    """Its state_dict has a tensor that is none of its parameters."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.double)

    @staticmethod
    def double(model, state, prefix, details):
        state["doubled"] = state["0.weight"] * 2


def saves(folder):
    """Bytes that are whole on a rank while rank 0 alone gets the model, and what it gets."""
    seen = {}
    for kind in (Written, Doubling):
        torch.manual_seed(2)
        model = kind()
        engine = poise.Engine(model, config_of(FP32, 3), units=[nn.Linear])
        engine.step([torch.ones(2, 64)], lambda x, m=model: (m(x).square().mean(), 1))
        with engine.gathered():
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        engine.restart_peak()
        files = trainer_saving.ModelFiles(engine, dist.get_rank() == 0)
        peaks = engine.memory()["own_peak"]
        files.write(str(folder))
        got = engine.state_dict(rank=1)
        whole = sum(p.numel() * 4 for p in model.parameters())
        seen[kind.__name__] = {
            "whole": peaks["gathered"] / whole,
            "same": not got if dist.get_rank() == 0 else digest(got) == digest(expected),
        }
        if dist.get_rank() == 0:
            written = torch.load(folder / "written.pt")
            seen[kind.__name__]["written"] = digest(written) == digest(expected)
    return seen


def forwards(folder):
    """A forward of the three-call form that fails on both ranks, is caught, and is run again."""
    seen = {}
    windows = windows_of([2, 2], UPDATES)
    for stage in (0, 1, 2):
        for fails in (False, True):
            model = tiny()
            engine = poise.Engine(model, config_of(FP32, stage, 2))
            numbers = []
            for window in windows:
                for piece in window[dist.get_rank()]:
                    if fails:
                        bad = {**piece, "input_ids": piece["input_ids"] + VOCABULARY}
                        assert "IndexError" in message_of(lambda e=engine, b=bad: e(**b))
                    engine.backward(engine(**piece), counted(piece))
                result = engine.step()
                numbers.append([result.loss, result.grad_norm])
            seen[f"{stage}, {fails}"] = [numbers, digest(masters_of(engine))]
    return seen


def two_forwards(folder):
    """Several forwards, then one backward of what they give."""
    seen = {}
    windows = windows_of([2, 2], UPDATES)
    for stage in STAGES:
        model = tiny()
        engine = poise.Engine(model, config_of(FP32, stage, 1))
        numbers = []
        for window in windows:
            one, two = window[dist.get_rank()]
            first = engine(**one) * counted(one)
            engine.backward(first + engine(**two) * counted(two), counted(one) + counted(two))
            result = engine.step()
            numbers.append([result.loss, result.grad_norm])
        seen[str(stage)] = [numbers, digest(masters_of(engine))]
    return seen


def failing(folder):
    """At stage 3 a forward that fails on rank 1 ends the group, and both ranks say why."""
    model = tiny()
    engine = poise.Engine(model, config_of(FP32, 3, 1))
    piece = batch(2, 8, seed=dist.get_rank())
    if dist.get_rank() == 1:
        piece["input_ids"] += VOCABULARY
    return message_of(lambda: engine.backward(engine(**piece)))


def skipping(folder):
    """Rank 1 leaves out a block."""
    model = tiny()
    engine = poise.Engine(model, config_of(FP32, 3, 1))
    skips = dist.get_rank() == 1

    def loss(piece):
        hidden = model.embedding(piece["input_ids"])
        for block in list(model.blocks)[1 if skips else 0 :]:
            hidden = block(hidden)
        return model.head(hidden).square().mean()

    return message_of(lambda: engine.step([batch(2, 8, seed=0)], loss))


def changed(folder):
    """What was settled when the engine was made."""
    model = tiny()
    engine = poise.Engine(model, config_of(FP32, 3, 1))
    piece = batch(2, 8, seed=dist.get_rank())
    engine.step([piece])
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return message_of(lambda: engine.step([piece]))


class Regions(TinyForCausalLM):
    """Six blocks, recomputed in regions of `size` of them; 0: not at all."""

    def __init__(self, size, reentrant):
        super().__init__(layers=6)
        self.size, self.reentrant = size, reentrant

    def logits(self, input_ids):
        hidden = self.embedding(input_ids)
        step = self.size or 1
        for first in range(0, len(self.blocks), step):
            region = nn.Sequential(*self.blocks[first : first + step])
            if self.size:
                hidden = checkpoint(region, hidden, use_reentrant=self.reentrant)
            else:
                hidden = region(hidden)
        return self.head(hidden)


def regions(folder):
    """Gathers of parameters in a micro-batch, by what is recomputed, and how."""
    seen = {}
    for reentrant in (False, True):
        for size in (0, 1, 2, 3, 6):
            torch.manual_seed(4)
            model = Regions(size, reentrant)
            engine = poise.Engine(model, config_of(FP32, 3), units=[Block])
            calls = []
            for count in (1, 1, 3):
                window = [batch(2, 8, seed=n) for n in range(count)]
                engine.group.reset_traffic()
                engine.step(window, lambda piece, m=model: (m(**piece), counted(piece)))
                calls.append(engine.group.traffic()["all_gather"]["calls"])
            seen[f"{size}, {reentrant}"] = (calls[2] - calls[1]) / 2  # the rest is the window's
    return seen


CASES = {
    "regions": regions,
    "uses": uses,
    "late": late,
    "gradient_hooks": gradient_hooks,
    "parts": parts,
    "copies": copies,
    "saves": saves,
    "forwards": forwards,
    "two_forwards": two_forwards,
    "failing": failing,
    "skipping": skipping,
    "changed": changed,
}


if __name__ == "__main__":
    rank_processes.main(CASES)
