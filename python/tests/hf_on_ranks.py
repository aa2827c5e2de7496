"""Run by test_hf_ranks.py, once for each rank: a transformers model in poise.Trainer."""

import json
import sys

import poise
import torch
from hf_models import MODELS, made

name, stage, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
trainer = poise.Trainer(
    made(name),
    poise.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        global_batch_size=8,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
        gradient_checkpointing=True,
        zero_stage=stage,
        save_strategy="steps",
        save_steps=100,
    ),
    train_dataset=MODELS[name][1](20),
)
trainer.train()
metrics = trainer.evaluate(MODELS[name][1](5))
if trainer.is_world_process_zero():
    lines = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(json.dumps({"losses": lines, "eval_loss": metrics["eval_loss"]}))
