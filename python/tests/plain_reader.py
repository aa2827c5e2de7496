"""A reader of saves written from docs/state_format.md alone: Python, numpy and xxhash, nothing of poise or torch.

What is not as the page says is an AssertionError.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy
import xxhash

TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "U8": "u1", "BOOL": "?"}


class Save:
    """A save's manifest, and the runs of elements of all its files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        text = (self.folder / "manifest.json").read_bytes()
        self.manifest: dict[str, Any] = json.loads(text)
        own = self.manifest["xxh64"]
        begin = text.index(own.encode())
        zeroed = text[:begin] + b"0" * 16 + text[begin + 16 :]
        assert xxhash.xxh64_hexdigest(zeroed) == own
        assert (self.manifest["format"], self.manifest["version"]) == ("poise-state", 4)
        self.runs: dict[tuple[str, str], list[tuple[int, numpy.ndarray, int | None]]] = {}
        self.own: dict[int, dict[str, str]] = {}
        for entry in self.manifest["files"]:
            data = (self.folder / entry["name"]).read_bytes()
            assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (entry["bytes"], entry["xxh3"])
            if entry["rank"] is not None:
                self._read_shard(data, entry["rank"])

    def _read_shard(self, data: bytes, rank: int) -> None:
        [length] = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        own = header.pop("__metadata__", {})
        assert self.own.setdefault(rank, own) == own
        for key, tensor in header.items():
            kind, rest = key.split("@", 1)
            first, name = rest.split(":", 1)
            begin, end = (8 + length + place for place in tensor["data_offsets"])
            values = numpy.frombuffer(data[begin:end], elements_of(tensor["dtype"]))
            assert list(values.shape) == tensor["shape"]
            self.runs.setdefault((kind, name), []).append(
                (int(first), widened(values, tensor["dtype"]), rank)
            )

    def elements(self, kind: str, name: str, count: int) -> numpy.ndarray:
        """All of them in their order; each is in one file."""
        runs = sorted(self.runs[kind, name], key=lambda run: run[0])
        at = 0
        for first, values, _ in runs:
            assert first == at, (kind, name, first, at)
            at += len(values)
        assert at == count, (kind, name, at, count)
        return numpy.concatenate([values for _, values, _ in runs])

    def parameter(self, entry: dict[str, Any], kind: str = "") -> numpy.ndarray:
        """In its shape: master or value, or another kind with an element for each of its own."""
        shape, order = entry["shape"], entry["order"]
        kind = kind or ("master" if entry["trainable"] else "value")
        flat = self.elements(kind, entry["name"], math.prod(shape))
        in_memory = flat.reshape([shape[dimension] for dimension in order])
        return in_memory.transpose(numpy.argsort(order).astype(int)) if order else in_memory

    def buffer(self, entry: dict[str, Any], rank: int = 0) -> numpy.ndarray:
        """A rank's own, or rank 0's."""
        of_rank = {r: values for _, values, r in self.runs["buffer", entry["name"]]}
        return of_rank.get(rank, of_rank[0]).reshape(entry["shape"])


def elements_of(dtype: str) -> numpy.dtype:
    return numpy.dtype("<u2" if dtype == "BF16" else "<" + TYPES[dtype])


def widened(values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """bf16, which numpy does not have, as the upper half of fp32."""
    if dtype != "BF16":
        return values
    return (values.astype(numpy.uint32) << 16).view(numpy.float32)
