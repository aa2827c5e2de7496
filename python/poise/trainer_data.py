"""The batches of a Trainer: the windows of its training data, and the batches of an evaluation."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from poise import eval_share
from poise._C import Error, Group
from poise._feeds import has_own_order
from poise.data import WindowIterator
from poise.training_arguments import TrainingArguments

logger = logging.getLogger("poise")


def train_windows(
    dataset: Any, args: TrainingArguments, collate: Callable | None = None
) -> WindowIterator:
    """This rank's windows of all epochs, without end; a DataLoader keeps its batches."""
    seed = args.seed if args.data_seed is None else args.data_seed
    order: dict[str, Any] = {"accumulation": args.accumulation, "seed": seed, "epochs": None}
    if args.accumulation_ramp_updates > 0:
        order["prefetch"] = 0  # windows change their length
    if splits_over(dataset, args) > 1:
        order |= {"ranks": args.world_size, "rank": args.process_index}
    elif args.world_size > 1:
        _say_what_ranks_read(dataset, args)
    if isinstance(dataset, DataLoader):
        return WindowIterator(dataset, **order)
    dataset = _of_this_rank(dataset, args)
    if not isinstance(dataset, IterableDataset):
        _check_size(dataset)
        order["shuffle"] = args.train_sampling_strategy == "random"
    options = {"drop_last": args.dataloader_drop_last, **loader_options(args, collate)}
    return WindowIterator(dataset, args.per_device_train_batch_size, **order, **options)


def splits_over(dataset: Any, args: TrainingArguments) -> int:
    """How many ranks the samples are dealt out to here: 1 where the data does that itself.

    Iterable data does (nothing else can stop two ranks from reading the same), and so does a loader
    whose sampler knows the ranks. Raises Error on a loader with another order of its own.
    """
    loader = dataset if isinstance(dataset, DataLoader) else None
    if args.world_size == 1 or isinstance(dataset, IterableDataset):
        return 1
    if loader is None or not has_own_order(loader):
        return args.world_size
    if isinstance(loader.dataset, IterableDataset) or eval_share.splits_itself(loader):
        return 1
    raise Error(
        f"[trainer] train_dataset is a DataLoader with {type(loader.sampler).__name__}, which gives "
        f"all {args.world_size} ranks the same samples; use torch's DistributedSampler, or give the "
        "dataset"
    )


def check_train(dataset: Any) -> None:
    """Raises Error where it is several datasets, as load_dataset() gives them."""
    if isinstance(dataset, Mapping):
        names = list(map(str, dataset))
        first = "train" if "train" in names else next(iter(names), "name")
        raise Error(
            f"[trainer] train_dataset is a {type(dataset).__name__} of {', '.join(names) or 'nothing'}; give "
            f'one of them, for example dataset["{first}"]'
        )


def _is_undivided_stream(data: Any) -> bool:
    """Whether it is a stream of the package datasets that reads everything on every rank."""
    theirs = type(data).__module__.partition(".")[0] == "datasets"
    return theirs and getattr(data, "_distributed", None) is None


def _of_this_rank(dataset: Any, args: TrainingArguments) -> Any:
    if args.world_size == 1 or not isinstance(dataset, IterableDataset):
        return dataset
    if not _is_undivided_stream(dataset):
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank=args.process_index, world_size=args.world_size)


def _say_what_ranks_read(dataset: Any, args: TrainingArguments) -> None:
    data = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    if isinstance(data, IterableDataset):
        if args.eval_strategy == "epoch":
            raise Error(
                f"[trainer] eval_strategy epoch on {args.world_size} ranks that each read "
                f"{type(data).__name__} by themselves: their epochs need not end together; use steps"
            )
        if data is dataset and _is_undivided_stream(data):
            return
        logger.warning(
            "[trainer] every rank reads %s by itself: it must give each rank other samples "
            "(torch.distributed.get_rank() tells)",
            type(data).__name__,
        )


def batches_per_epoch(dataset: Any, args: TrainingArguments) -> int | None:
    """Micro-batches of one pass, of all ranks that share them; None where the data does not say."""
    if isinstance(dataset, DataLoader) and isinstance(dataset.dataset, IterableDataset):
        return None
    size = examples(dataset)
    if size is None or isinstance(dataset, DataLoader):
        return size if size is None else len(dataset)
    micro_batches = size / args.per_device_train_batch_size
    return math.floor(micro_batches) if args.dataloader_drop_last else math.ceil(micro_batches)


def examples(dataset: Any) -> int | None:
    """Samples of one pass; None where the data does not say."""
    dataset = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    try:
        return len(dataset)
    except TypeError:
        return None


def eval_batches(
    dataset: Any, args: TrainingArguments, collate: Callable | None = None
) -> DataLoader:
    """Batches of an evaluation, in order, none dropped; a DataLoader is used as it is."""
    if isinstance(dataset, DataLoader):
        return dataset
    return DataLoader(
        dataset,
        batch_size=args.per_device_eval_batch_size,
        generator=torch.Generator(),  # starting workers must not move the model's dropout
        **loader_options(args, collate),
    )


def eval_share_of(
    dataset: Any, args: TrainingArguments, collate: Callable | None, group: Group
) -> Any:
    """This rank's share of an evaluation's batches."""
    return eval_share.share_of(eval_batches(dataset, args, collate), group)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; other values stay. What has a method for that uses
    it: PackedSequence (whose sizes stay on the CPU), graphs, transformers' BatchEncoding."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        # A copy, since many move their tensors in place: the window's own stays where it is.
        own = batch if isinstance(batch, tuple) else copy.copy(batch)
        try:
            return own.to(device, non_blocking=True)
        except TypeError:  # one that does not know the word
            return own.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def loader_options(args: TrainingArguments, collate: Callable | None) -> dict[str, Any]:
    """Of a DataLoader made for a dataset."""
    workers = args.dataloader_num_workers
    return {
        "collate_fn": collate,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
        "prefetch_factor": args.dataloader_prefetch_factor if workers > 0 else None,
    }


def _check_size(dataset: Any) -> None:
    size = examples(dataset)
    if size is None:
        raise Error(
            f"[trainer] train_dataset is {type(dataset).__name__}, which has no length; give a "
            "torch dataset, a list, an IterableDataset or a DataLoader"
        )
    if size == 0:
        raise Error("[trainer] train_dataset is empty; give at least one sample")
