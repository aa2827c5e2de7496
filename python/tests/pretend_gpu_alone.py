"""A Trainer's script on a pretend GPU, which leaves torch.distributed to it: `FOLDER [by the script]`."""

from __future__ import annotations

import sys

import poise
import pretend_gpu
import torch.distributed as dist
from test_trainer import Rows, arguments
from tiny_models import tiny

if __name__ == "__main__":
    pretend_gpu.switch_on()
    settings = arguments(sys.argv[1], use_cpu=False, max_steps=2, zero_stage=1, save_strategy="no")
    trainer = poise.Trainer(tiny(), settings, train_dataset=Rows())
    trainer.train()
    print("trained over", trainer.engine.group.backend)
    if sys.argv[2] == "by the script":
        dist.destroy_process_group()
