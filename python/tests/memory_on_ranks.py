"""One rank of test_memory_ranks.py: `memory_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import dataclasses
import random

import poise
import rank_processes
import torch
import torch.distributed as dist
from plain_loop import settings
from poise import balance, measured_fit, trace, trainer_balance
from poise.misfit import NothingFits
from poise.model_call import ModelCall
from tiny_models import TinyForCausalLM, batch, counted, split, tiny
from torch import nn
from training_on_ranks import FP32, STAGES, digest, masters_of

UPDATES = 3
BUDGETS = {"none": STAGES, "every_n": (3,)}  # stages by policy of recomputation
K = 2  # micro-batches of a rank


class Model(TinyForCausalLM):
    """With a buffer that every forward changes."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids, labels):
        self.calls += input_ids.shape[0]
        return super().forward(input_ids, labels)


def windows():
    """This rank's; those of rank 1 are the longer ones."""
    rank = dist.get_rank()
    length = 24 if rank == 1 else 6
    wholes = [batch(16 * K, length, seed=10 * n + rank, masked=0.3) for n in range(UPDATES)]
    return [split(whole, 16) for whole in wholes]


def config_of(stage, policy="none", budget=0):
    sections = {"zero": {"stage": stage}, "checkpointing": {"policy": policy}}
    if budget:
        sections["memory"] = {"budget_bytes": budget}
    return settings(dataclasses.replace(FP32), K, **sections)


class Trial:
    """A model that trains; `fault` is called with every micro-batch that is run."""

    def __init__(self, config, fault=lambda model, piece, number: None):
        torch.manual_seed(5)
        self.model = Model()
        self.engine = poise.Engine(self.model, config)
        self.halving = trainer_balance.Halving(self.engine, self.note)
        self.notes, self.peaks, self.numbers, self.runs = [], [], [], 0
        self.fault = fault
        torch.manual_seed(50 + dist.get_rank())

    def note(self, line):
        self.notes.append(line)

    def loss(self, piece):
        self.runs += 1
        extra = self.fault(self.model, piece, self.runs)
        loss = self.model(**piece)
        return (loss if extra is None else loss + extra, counted(piece))

    def train(self, halves=False):
        for window in windows():
            if halves:
                window = [part for whole in window for part in trainer_balance.split(whole, 2)]
            result = self.halving(window, lambda pieces: self.engine.step(pieces, self.loss))
            self.peaks.append(result.peak_bytes)
            self.numbers.append([result.loss, result.grad_norm, result.tokens, result.updates])
        self.random = digest({"next": torch.rand(4)})
        return self

    def seen(self):
        return {
            "numbers": self.numbers,
            "masters": digest(masters_of(self.engine)),
            "calls": float(self.model.calls),
            "random": self.random,
        }


def highest(trial):
    """Over all ranks and updates."""
    peak = torch.tensor(float(max(trial.peaks)))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def budgets(folder):
    """A budget that whole micro-batches of rank 1 do not fit, but halves do."""
    seen = {}
    for policy, stages in BUDGETS.items():
        for stage in stages:
            halves = Trial(config_of(stage, policy)).train(halves=True)
            whole = Trial(config_of(stage, policy)).train()
            # Near the former: the first micro-batch of a run, which gathers nothing ahead, needs less.
            budget = (3 * highest(halves) + highest(whole)) // 4
            fitted = Trial(config_of(stage, policy, budget)).train()
            seen[f"{policy}, {stage}"] = {
                "halves": halves.seen(),
                "whole": whole.seen(),
                "fitted": fitted.seen(),
                "notes": fitted.notes,
                "runs": [halves.runs, whole.runs, fitted.runs],
                "own": [max(whole.peaks), budget],
            }
    return seen


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        held = [torch.ones(1000) for _ in range(10)]
        raise torch.OutOfMemoryError(f"in backward, {len(held)} tensors held")


def run_out(model, where):
    """Now, or by a term of the loss that does in backward."""
    if where == "forward":
        raise torch.OutOfMemoryError("in forward")
    return Failing.apply(model.head.bias.sum()) * 0


def python_errors(folder):
    """Memory that runs out in code of Python's: in the loss function, and in a backward."""
    seen = {}
    for stage in STAGES:
        halves = Trial(config_of(stage)).train(halves=True)
        for where in ("forward", "backward"):
            for of_all in (False, True):

                def fault(model, piece, number, where=where, of_all=of_all):
                    if number != 2 - (of_all and dist.get_rank()) or (
                        dist.get_rank() == 1 and not of_all
                    ):
                        return None
                    return run_out(model, where)

                trial = Trial(config_of(stage), fault)
                held = trial.engine.memory()["current_bytes"]
                trial.train()
                seen[f"{stage}, {where}, {of_all}"] = {
                    "same": trial.seen() == halves.seen(),
                    "notes": trial.notes,
                    "held": trial.engine.memory()["current_bytes"] - held,
                }
    return seen


def by_hand(folder):
    """The three-call form: a forward (told to the engine, or at stage 3 by itself) or backward of
    rank 1 runs out, both ranks run the window again in halves."""
    seen = {}
    for stage in STAGES:
        halves = Trial(config_of(stage)).train(halves=True)
        for where in ("forward", "backward"):
            told = []

            def fault(model, piece, number, where=where):
                if number != 2 or dist.get_rank() == 0:
                    return None
                return run_out(model, where)

            trial = Trial(config_of(stage), fault)
            engine = trial.engine

            def step(pieces, trial=trial, engine=engine, told=told):
                engine.set_accumulation(len(pieces))
                lost = engine.lost_windows
                try:
                    for piece in pieces:
                        with engine.forward_scope():
                            loss, count = trial.loss(piece)
                        engine.backward(loss, count)
                    return engine.step()
                except torch.OutOfMemoryError as error:
                    if engine.lost_windows == lost:
                        engine.lose_window(str(error))
                    told.append(str(error))
                    raise

            for window in windows():
                result = trial.halving(window, step)
                trial.peaks.append(result.peak_bytes)
                trial.numbers.append([result.loss, result.grad_norm, result.tokens, result.updates])
            trial.random = digest({"next": torch.rand(4)})
            seen[f"{stage}, {where}"] = {
                "same": trial.seen() == halves.seen(),
                "told": told,
                "lost": engine.lost_windows,
            }
    return seen


class ByHand(poise.Trainer):
    """With a training_step of its own; rank 1 runs out of memory in the second micro-batch."""

    where, number = "forward", 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.number += 1
        fails = self.number == 2 and self.args.process_index == 1
        if fails and self.where == "forward":
            raise torch.OutOfMemoryError("in forward")
        loss = self.compute_loss(model, inputs)
        if fails:
            loss = loss + Failing.apply(model.head.bias.sum()) * 0
        self.accelerator.backward(loss)
        return loss.detach()


class Tried:
    """How many windows were trials of balances: those are dropped on all ranks, too."""

    def __init__(self):
        self.run, self.count = trace._run, 0
        trace._run = self

    def __call__(self, *args):
        self.count += 1
        return self.run(*args)

    def lost_besides(self, engine):
        return engine.lost_windows - self.count


def trainers(folder):
    """A Trainer's step by hand, whose split was found."""
    seen = {}
    rows = [{name: row[0] for name, row in batch(1, 8, seed=n).items()} for n in range(32)]
    for stage in (0, 3):
        for where in ("forward", "backward"):
            arguments = poise.TrainingArguments(
                str(folder / f"{stage}_{where}"), global_batch_size=16, memory_budget="1GiB",
                max_steps=2, zero_stage=stage, use_cpu=True, disable_tqdm=True, save_strategy="no",
                checkpointing="none", separable_loss=True,
            )  # fmt: skip
            trainer = ByHand(tiny(), arguments, train_dataset=rows)
            trainer.where = where
            tried = Tried()
            output = trainer.train()
            trace._run = tried.run
            seen[f"{stage}, {where}"] = [
                output.global_step,
                tried.lost_besides(trainer.engine),
                digest(trainer.engine.state_dict()),
            ]
    return seen


LONG, SHORT = 96, 6  # tokens


def padded(rows):
    length = max(len(row["input_ids"]) for row in rows)

    def column(name, filling):
        missing = [
            nn.functional.pad(r[name], (0, length - len(r[name])), value=filling) for r in rows
        ]
        return torch.stack(missing)

    return {"input_ids": column("input_ids", 0), "labels": column("labels", -100)}


def longer_on_one_rank(folder):
    """A Trainer that found its split on short samples, and then rank 1 gets long ones."""
    seen = {}
    trainer_balance.LOOKED_AT = 8  # those of rank 0 in the first update
    measured_fit.Fit.seconds = lambda self, size: 1.0  # so that the largest that fits is chosen
    # Of each 16 the last 8 are rank 1's.
    lengths = [LONG if n % 16 >= 8 else SHORT for n in range(48)]
    rows = [
        {name: row[0] for name, row in batch(1, length, seed=n).items()}
        for n, length in enumerate(lengths)
    ]

    def train(name, **given):
        torch.manual_seed(5)
        arguments = poise.TrainingArguments(
            str(folder / name), global_batch_size=16, max_steps=3, logging_steps=1, use_cpu=True,
            train_sampling_strategy="sequential", checkpointing="none", disable_tqdm=True,
            save_strategy="no", learning_rate=1e-2, seed=4, **given,
        )  # fmt: skip
        trainer = poise.Trainer(
            Model(), arguments, data_collator=padded, train_dataset=rows, shift_labels=True
        )
        trainer.train()
        return trainer

    def seen_of(trainer):
        keys = ("loss", "grad_norm", "tokens")
        lines = [
            [line[key] for key in keys] for line in trainer.state.log_history if "loss" in line
        ]
        masters = digest(masters_of(trainer.engine))
        return {"lines": lines, "masters": masters, "calls": float(trainer.model.calls)}

    def peak_of(trainer):
        peak = torch.tensor(float(trainer.engine.memory()["peak_bytes"]))
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak)

    for stage in (0, 3):
        fixed = {
            size: train(f"{stage}_{size}", zero_stage=stage, per_device_train_batch_size=size)
            for size in (4, 8)
        }
        budget = (3 * peak_of(fixed[4]) + peak_of(fixed[8])) // 4
        mine = fixed[8].engine.memory()["peak_bytes"]
        tried = Tried()
        found = train(f"{stage}_found", zero_stage=stage, memory_budget=budget, separable_loss=True)
        trace._run = tried.run
        seen[stage] = {
            "found": seen_of(found),
            "halves": seen_of(fixed[4]),
            "chosen": found._found.chosen.micro_batch,
            "parts": found._halving.parts,
            "lost": tried.lost_besides(found.engine),
            "peak": found.engine.memory()["peak_bytes"],
            "own": [mine, budget],
        }
    return seen


def single(folder):
    """Nothing is left to be halved: the error stands, on both ranks."""
    trial = Trial(config_of(3))

    def loss(piece):
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("never enough")
        return trial.loss(piece)

    samples = [piece for piece in windows()[0] for piece in split(piece, 2)][:2]
    try:
        trial.halving(samples, lambda pieces: trial.engine.step(pieces, loss))
    except torch.OutOfMemoryError as error:
        return [str(error), trial.halving.parts]
    return []


def trials(folder):
    """The balance is sought where trials of more than two samples, or all, run out on rank 1 alone."""
    seen = {}
    for stage in STAGES:
        plain = Trial(config_of(stage)).train().seen()
        for where in ("forward", "backward"):
            for allowed in (2, 0):

                def fault(model, piece, number, where=where, allowed=allowed):
                    if dist.get_rank() == 0 or len(piece["input_ids"]) <= allowed:
                        return None
                    return run_out(model, where)

                trial = Trial(config_of(stage), fault)
                held = trial.engine.memory()["current_bytes"]
                try:
                    found = balance.find(
                        trial.engine,
                        lambda size: batch(size, 6, seed=size),
                        trial.loss,
                        samples=8,
                        budget=1 << 30,
                    )
                    chosen = found.chosen.micro_batch
                except NothingFits as error:
                    chosen = str(error)
                trial.fault = lambda model, piece, number: None
                seen[f"{stage}, {where}, {allowed}"] = {
                    "chosen": chosen,
                    "held": trial.engine.memory()["current_bytes"] - held,
                    "same": trial.train().seen() == plain,
                }
    return seen


class DropsLayers(Model):
    """Leaves out a block now and then, another one on each rank."""

    def __init__(self):
        super().__init__()
        self.draws = random.Random(dist.get_rank())

    def logits(self, input_ids):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            if self.draws.random() > 0.3:
                hidden = block(hidden)
        return self.head(hidden)


def left_out_blocks(folder):
    """The balance of a model whose blocks do not run one after the other on each rank each time."""
    seen = {}
    for stage in (0, 2):
        engine = poise.Engine(DropsLayers(), config_of(stage))
        for number in range(4):
            found = balance.find(
                engine,
                lambda size: batch(size, 6, seed=size),
                lambda piece, engine=engine: (engine.model(**piece), counted(piece)),
                samples=8,
                budget=1 << 30,
            )
            seen[f"{stage}, {number}"] = [
                found.chosen.micro_batch,
                found.chosen.peak,
                found.measured,
            ]
    return seen


def first_sample(folder):
    """What the loss is a mean over is asked where the first sample runs out on rank 1 alone."""
    seen = {}
    for stage in STAGES:
        plain = Trial(config_of(stage)).train().seen()

        def fault(model, piece, number):
            return run_out(model, "forward") if dist.get_rank() == 1 and number == 1 else None

        trial = Trial(config_of(stage), fault)
        sizes = trainer_balance.micro_batches(
            trial.engine,
            None,
            ModelCall(trial.model, shift_labels=True),
            lambda: batch(1, 6, seed=1),
            lambda piece, trial=trial: poise.Loss(*trial.loss(piece)),
            samples=8,
        )
        seen[stage] = [sizes, trial.train().seen() == plain]
    return seen


def plans_alone(folder):
    """One rank asks for a plan of a model that is measured for it."""

    class Looks(Model):
        def forward(self, input_ids, labels):
            return super().forward(input_ids, labels) * float(input_ids.sum() * 0 + 1)

    seen = None
    if dist.get_rank() == 0:
        answer = poise.plan(Looks(), batch(2, 6, seed=1), global_batch_size=4)
        seen = [answer.traced_by, answer.best.held.get("communication", 0)]
    dist.barrier()
    return seen


CASES = {
    "budgets": budgets,
    "by_hand": by_hand,
    "first_sample": first_sample,
    "left_out_blocks": left_out_blocks,
    "plans_alone": plans_alone,
    "python_errors": python_errors,
    "longer_on_one_rank": longer_on_one_rank,
    "single": single,
    "trainers": trainers,
    "trials": trials,
}


if __name__ == "__main__":
    rank_processes.main(CASES)
