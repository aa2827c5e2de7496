"""`deepspeed.utils.zero_to_fp32` of poise: the model of a save as one fp32 state_dict, without ranks.

Also `python -m poise.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poise import _C
from poise._C import Error
from poise.engine import engine_of
from poise.trainer_saving import write_model


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The model's state_dict on the CPU: masters of 16-bit parameters as they were saved, ties kept.

    Args:
      checkpoint_dir: as given to save_checkpoint.
      tag: of the save; None: the latest one.
      exclude_frozen_parameters: leaves those out.
      lazy_mode: accepted; tensors are read at once.
    """
    return dict(_C.read_model(_save_of(checkpoint_dir, tag), not exclude_frozen_parameters))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Any, tag: Any = None
) -> nn.Module:
    """The model on the CPU with the values of a save. An engine that has trained it is done with."""
    engine = next((e for e in map(engine_of, model.parameters()) if e is not None), None)
    if engine is not None:
        if engine.shards_parameters():
            raise Error(
                "[deepspeed] load_state_dict_from_zero_checkpoint: the model's parameters are sharded "
                "by an engine; call engine.destroy() on all ranks first"
            )
        engine.give_back()
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: Any = None,
    safe_serialization: bool = False,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the state_dict as pytorch_model.bin, or model.safetensors.

    Args:
      output_dir: a folder; or, as in older versions, the file's own path.
      max_shard_size: accepted; it is one file.
      safe_serialization: as safetensors.
    """
    path = Path(output_dir)
    if path.suffix in (".bin", ".pt", ".pth", ".safetensors"):
        safe_serialization = safe_serialization or path.suffix == ".safetensors"
    else:
        path /= "model.safetensors" if safe_serialization else "pytorch_model.bin"
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    path.parent.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        write_model(state, path)
    else:
        torch.save(state, path)


def _save_of(folder: Any, tag: Any) -> str:
    path = Path(folder) if tag is None else Path(folder) / str(tag)
    if not (found := _C.find_save(str(path))):
        raise Error(
            f"[deepspeed] there is no whole save in {path}; give the folder that save_checkpoint got, "
            "which DeepSpeed's own checkpoints are not"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The model of a save as one fp32 state_dict.")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir", help="a folder, or a file .bin or .safetensors")
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    given = vars(parser.parse_args())
    convert_zero_checkpoint_to_fp32_state_dict(**given)


if __name__ == "__main__":
    main()
