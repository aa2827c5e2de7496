"""One rank of test_trainer_ranks.py: `trainer_on_ranks.py CASE FOLDER`, started by rank_processes."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from pathlib import Path

import poise
import rank_processes
import torch
import torch.distributed as dist
from poise import ranks, run_log
from test_trainer import Rows, arguments
from tiny_models import tiny
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

UPDATES, SAMPLES = 6, 21  # windows of 8, 8 and 5 samples: 2 for one rank and 3 for the other
SETTINGS = {
    "global_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": UPDATES,
    "per_device_eval_batch_size": 2,
}


class Words(IterableDataset):
    """Rows whose batches do not say how many there are."""

    def __iter__(self):
        return iter(Rows(5, seed=9).rows)


class Classes(nn.Module):
    """Logits beside the loss, for predict()."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def class_rows(size):
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(3, generator=generator) for _ in range(size)]
    return [{"x": row, "labels": torch.tensor(i % 4)} for i, row in enumerate(rows)]


def accuracy(pair):
    return {"accuracy": (pair.predictions.argmax(-1) == pair.label_ids).mean()}


def loaders():
    """The five rows of Words in every form that an evaluation takes."""
    rows = Rows(5, seed=9)
    return {
        "dataset": rows,
        "one batch": Rows(1, seed=9),
        "shuffled": DataLoader(rows, batch_size=2, shuffle=True),
        "iterable": DataLoader(Words(), batch_size=2),
        "batch sampler": DataLoader(rows, batch_sampler=[[0, 1], [2, 3], [4]]),
    }


def evaluated(folder):
    """Evaluations and predictions of a model that was not trained."""
    trainer = poise.Trainer(tiny(), arguments(folder, **SETTINGS))
    losses = {name: trainer.evaluate(data)["eval_loss"] for name, data in loaders().items()}
    predicts = poise.Trainer(Classes(), arguments(folder, **SETTINGS), compute_metrics=accuracy)
    of_sizes = {}
    for size in (1, 5, 8):
        output = predicts.predict(class_rows(size))
        of_sizes[size] = [
            output.predictions.tolist(),
            output.label_ids.tolist(),
            output.metrics["test_accuracy"],
            output.metrics["test_loss"],
        ]
    return {"losses": losses, "predictions": of_sizes}


def digest(tensors):
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


class Watches(poise.TrainerCallback):
    """What a rank sees of a run; rank `stops` asks for its end after the second update."""

    def __init__(self, stops=None):
        self.seen, self._stops = {"evals": [], "seeds": [], "losses": [], "rates": []}, stops

    def on_step_end(self, args, state, control, **details):
        self.seen["seeds"].append(torch.initial_seed())
        self.seen["losses"].append(details["result"].loss)
        self.seen["rates"].append(details["result"].lr)
        self.seen["first"] = state.is_world_process_zero
        control.should_training_stop = self._stops == args.process_index and state.global_step == 2

    def on_evaluate(self, args, state, control, **details):
        self.seen["evals"].append(details["metrics"]["eval_loss"])


class AsksBefore(Watches):
    """Rank `stops` asks for the run's end before the third window."""

    def on_step_begin(self, args, state, control, **details):
        if self._stops == args.process_index and state.global_step == 2:
            control.should_training_stop = True

    def on_step_end(self, args, state, control, **details): ...


@contextlib.contextmanager
def agreements():
    """The number of times that ranks asked each other what their callbacks want."""
    count, any_of = [0], ranks.any_of

    def counted(group, flags):
        count[0] += len(flags) == len(run_log._AGREED)
        return any_of(group, flags)

    ranks.any_of = counted
    try:
        yield count
    finally:
        ranks.any_of = any_of


def say(model):
    """Of the whole model: a sum over all parameters, and a forward."""
    row = {name: value[None] for name, value in Rows(1, seed=9).rows[0].items()}
    return (
        f"{sum(float(p.detach().double().sum()) for p in model.parameters())} {float(model(**row))}"
    )


def trained(folder, stage, stops=None, resume=None, watches=Watches, **changes):
    """A whole run, with evaluations in between; or the rest of one."""
    args = arguments(
        folder, zero_stage=stage, eval_strategy="steps", eval_steps=3, **{**SETTINGS, **changes}
    )
    watch = watches(stops)
    model = tiny(seed=7 * args.process_index)  # other values on each rank: those of rank 0 hold
    trainer = poise.Trainer(
        model,
        args,
        train_dataset=Rows(SAMPLES),
        eval_dataset=Rows(5, seed=9),
        callbacks=[watch, poise.Samples(say, every=4)],
    )
    with agreements() as count:
        output = trainer.train(resume_from_checkpoint=resume)
    return {
        **watch.seen,
        "agreements": count[0],
        "step": output.global_step,
        "tokens": output.metrics["train_tokens"],
        "state": digest(trainer.engine.state_dict()),
        "last": trainer.evaluate()["eval_loss"],
        "level": poise.trainer_data.logger.level,
    }


def twice(folder, stage):
    """A second train() goes on from the values of the first."""
    args = arguments(folder, zero_stage=stage, **{**SETTINGS, "max_steps": 2})
    trainer = poise.Trainer(tiny(seed=0), args, train_dataset=Rows(SAMPLES))
    trainer.train()
    between = digest(trainer.engine.state_dict())
    trainer.train()
    return [between, digest(trainer.engine.state_dict())]


def runs(folder):
    values = {"before": evaluated(folder)}
    values["backend"] = dist.get_backend()
    for stage in range(4):
        values[f"stage {stage}"] = trained(folder / f"stage{stage}", stage)
    values["kept"] = trained(folder / "kept", 3, zero_keep_gathered=True)
    values["twice"] = [twice(folder / f"twice{stage}", stage) for stage in (2, 3)]
    values["saving"] = trained(folder / "saving", 2, save_steps=2)
    for step in (2, 4):  # the middle of an epoch, and another's
        place = str(folder / "saving" / f"checkpoint-{step}")
        values[f"resumed {step}"] = trained(folder / f"resumed{step}", 2, resume=place)
    values["stopped"] = trained(folder / "stopped", 1, stops=1)
    values["stopped before"] = trained(folder / "before", 1, stops=1, watches=AsksBefore)
    values["shown"] = trained(folder / "shown", 2, disable_tqdm=None, max_steps=1)["step"]
    values["own sampler"] = own_sampler(folder / "own")
    values["nonfinite"] = nonfinite(folder / "nonfinite")  # ends the group
    return values


def own_sampler(folder):
    rows = Rows(8)
    sampler = DistributedSampler(rows, shuffle=False)
    loader = DataLoader(rows, batch_size=2, sampler=sampler)
    args = arguments(folder, gradient_accumulation_steps=1, num_train_epochs=1)
    output = poise.Trainer(tiny(), args, train_dataset=loader).train()
    uneven = DataLoader(Rows(5, seed=9), batch_size=1, sampler=DistributedSampler(Rows(5)))
    evaluation = poise.Trainer(tiny(), args).evaluate(uneven)
    whole = sum((row["labels"][1:] != -100).sum().item() for row in rows.rows)
    return [output.global_step, output.metrics["train_tokens"] == whole, evaluation["eval_loss"]]


def nonfinite(folder):
    """Stage 3, and the second micro-batch of rank 1 spoils the loss."""

    class Spoiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny()

        def forward(self, input_ids, labels, spoil):
            hidden = self.inner(input_ids, labels)
            return hidden * spoil.mean()

    rows = [{**row, "spoil": torch.ones(())} for row in Rows(8).rows]
    rows[7]["spoil"] = torch.tensor(torch.nan)
    args = arguments(folder, zero_stage=3, train_sampling_strategy="sequential")
    try:
        poise.Trainer(Spoiled(), args, train_dataset=rows).train()
    except poise.Error as error:
        return str(error)
    return "no error"


def fails(folder):
    """A callback of rank 1 raises: rank 0 must not wait for it."""

    class Raises:
        def on_step_end(self, args, state, control, **details):
            if args.process_index == 1 and state.global_step == 2:
                raise ValueError("disk of rank 1")

    begin = time.monotonic()
    try:
        poise.Trainer(
            tiny(), arguments(folder, **SETTINGS), train_dataset=Rows(), callbacks=[Raises()]
        ).train()
    except (poise.Error, ValueError) as error:
        return [type(error).__name__, str(error), time.monotonic() - begin < 20]
    return ["none", "", False]


def small(folder):
    output = trained(folder / "small", 1, max_steps=1)
    return [dist.get_rank(), dist.get_world_size(), output["losses"]]


CASES = {"runs": runs, "fails": fails, "small": small}


def main(name, folder):
    torch.set_num_threads(1)
    value = CASES[name](Path(folder))
    rank_processes.report(name, folder, dist.get_rank(), value)


if __name__ == "__main__":
    main(*sys.argv[1:])
