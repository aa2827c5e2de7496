"""training_step as people write it for transformers' Trainer, by the version it was written for; run as a program, one of
them on several ranks."""

import json
import sys

import poise
import torch
from hf_models import causal_rows, made
from torch import nn


def own(training_step):
    """Makes a subclass with it of a Trainer."""
    return lambda base: type("Own", (base,), {"training_step": training_step})


def loss_as_usual(trainer, model, inputs, num_items_in_batch):
    """What transformers' own steps of several versions begin with."""
    model.train()
    inputs = trainer._prepare_inputs(inputs)
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


@own
def by_accelerator(self, model, inputs, num_items_in_batch=None):
    loss = loss_as_usual(self, model, inputs, num_items_in_batch)
    self.accelerator.backward(loss)
    return loss.detach()


@own
def by_plain_backward(self, model, inputs, num_items_in_batch=None):
    model.train()
    inputs = self._prepare_inputs(inputs)
    loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    loss.backward()
    return loss.detach()


@own
def divided(self, model, inputs, num_items_in_batch=None):
    """The mean of micro-batches' means, which a step makes by itself."""
    loss = self.compute_loss(model, self._prepare_inputs(inputs))
    loss = loss / self.args.gradient_accumulation_steps
    self.accelerator.backward(loss)
    return loss.detach()


@own
def multiplied(self, model, inputs, num_items_in_batch=None):
    outputs = model(**self._prepare_inputs(inputs))
    loss = outputs.loss * (1 / self.args.gradient_accumulation_steps)
    loss.backward()
    return loss.detach()


@own
def as_of_4_46(self, model, inputs, num_items_in_batch=None):
    if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
        self.optimizer.train()
    loss = loss_as_usual(self, model, inputs, num_items_in_batch)
    if self.args.n_gpu > 1:
        loss = loss.mean()
    if num_items_in_batch is None:
        loss = loss / self.args.gradient_accumulation_steps
    self.accelerator.backward(loss)
    return loss.detach()


@own
def as_of_4_57(self, model, inputs, num_items_in_batch=None):
    loss = loss_as_usual(self, model, inputs, num_items_in_batch)
    kwargs = {}
    if self.args.optim in ["lomo", "adalomo"]:
        kwargs["learning_rate"] = self._get_learning_rate()
    given = self.model_accepts_loss_kwargs and num_items_in_batch is not None
    if not given and self.compute_loss_func is None:
        loss = loss / self.current_gradient_accumulation_steps
    if self.accelerator.distributed_type == "DEEPSPEED":
        kwargs["scale_wrt_gas"] = False
    self.accelerator.backward(loss, **kwargs)
    return loss.detach()


def as_of_5(base):
    """With a compute_loss that is written out, too."""

    class Own(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            context, inputs = self._prepare_context_parallel_inputs(model, inputs)
            with context():
                model.train()
                inputs = self._prepare_inputs(inputs)
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                scaled = self.loss_is_scaled_for_ga
                if scaled is None:
                    scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                    scaled = scaled or self.compute_loss_func is not None
                if not scaled:
                    loss = loss / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)
                return loss.detach()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            parallelism = getattr(self.accelerator, "parallelism_config", None)
            assert parallelism is None and self.label_smoother is None
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
                inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
            outputs = model(**inputs)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
            counts = self.model_accepts_loss_kwargs or self.compute_loss_func
            if (
                self.args.average_tokens_across_devices
                and counts
                and num_items_in_batch is not None
            ):
                loss *= self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    return Own


@own
def of_logits(self, model, inputs, num_items_in_batch=None):
    """A loss of its own, with weights for the classes that are all 1."""
    inputs = self._prepare_inputs(inputs)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
    weights = torch.ones(logits.shape[-1])
    loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weights)
    (loss / self.args.gradient_accumulation_steps).backward()
    return loss.detach() / self.args.gradient_accumulation_steps


# What runs in transformers' Trainer as it does here; the first two leave the division out, which there has to be
# made by what a model returns.
STEPS = {
    "accelerator's": by_accelerator,
    "loss.backward()": by_plain_backward,
    "divided": divided,
    "multiplied": multiplied,
    "as of 4.46": as_of_4_46,
    "as of 4.57": as_of_4_57,
    "as of 5": as_of_5,
    "of logits": of_logits,
}


class Noted(poise.Trainer):
    """Notes what it can ask of its accelerator within a step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.synced, self.gathered = [], []

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.synced.append(self.accelerator.sync_gradients)
        loss.backward()
        assert self.accelerator.sync_gradients == self.synced[-1]
        mine = torch.tensor(self.accelerator.process_index + 1.0)
        self.gathered.append(self.accelerator.gather_for_metrics(mine).tolist())
        return loss.detach()


if __name__ == "__main__":
    stage, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    args = poise.TrainingArguments(
        folder, per_device_train_batch_size=2, global_batch_size=8, num_train_epochs=1,
        learning_rate=1e-2, logging_steps=1, disable_tqdm=True, use_cpu=True, save_strategy="no",
        train_sampling_strategy="sequential", zero_stage=stage,
    )  # fmt: skip
    trainer = Noted(made("llama"), args, train_dataset=causal_rows(20))
    trainer.train()
    mine = torch.tensor(trainer.accelerator.process_index + 1.0)
    total = float(trainer.accelerator.reduce(mine))
    if trainer.is_world_process_zero():
        lines = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        print(json.dumps({"losses": lines, "gathered": trainer.gathered, "sum": total}))
