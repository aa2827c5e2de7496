"""Reads DeepSpeed's JSON into poise's settings, by the table of poise.deepspeed.keys."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import difflib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from poise._C import Error
from poise.deepspeed.keys import OLD_NAMES, OLD_SWITCHES, TABLE, Key
from poise.deepspeed.monitor.config import SECTIONS, DeepSpeedMonitorConfig, get_monitor_config

logger = logging.getLogger("poise")

AUTO = "auto"
_MAX_BYTES = 1 << 24  # of a file: settings, not data
_MAX_DEPTH = 32
# Strings stay as they are, comments go.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(\s*[}\]])')
_FP16 = {  # DeepSpeed's own values where a file does not say
    "loss_scale_growth_interval": 1000,
    "loss_scale_hysteresis": 2,
}


@dataclasses.dataclass
class Settings:
    """What a file says.

    Attributes:
      engine: sections of poise.Engine's settings.
      optimizer: (type, params), None where the file has none.
      scheduler: the same.
      micro_batch: samples of a micro-batch; None: not said.
      drop_last: of the loader that initialize() makes.
      steps_per_print: 0: never.
      monitor: where figures go.
      values: the file's own numbers, of mapped keys.
      auto: keys that said "auto".
      notes: keys that were accepted and have nothing to do here: their reasons.
    """

    engine: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    optimizer: tuple[str, dict[str, Any]] | None = None
    scheduler: tuple[str, dict[str, Any]] | None = None
    micro_batch: int | None = None
    drop_last: bool = False
    steps_per_print: int = 0
    monitor: DeepSpeedMonitorConfig = dataclasses.field(default_factory=DeepSpeedMonitorConfig)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    auto: list[str] = dataclasses.field(default_factory=list)
    notes: dict[str, Key] = dataclasses.field(default_factory=dict)

    def tell_notes(self) -> None:
        """What somebody may miss as a warning, the rest in the log of information."""
        for path, key in self.notes.items():
            level = logging.WARNING if key.loud else logging.INFO
            logger.log(level, "[deepspeed] %s: %s", path, key.text)


def load(config: Any) -> dict[str, Any]:
    """The dictionary that a path, text, base64 text or dictionary stands for; old names are new."""
    if isinstance(config, Mapping):
        return _renamed(json.loads(json.dumps(config)))
    if not isinstance(config, (str, os.PathLike)):
        raise Error(
            f"[deepspeed] config is {type(config).__name__}; give a path, a dictionary or JSON text"
        )
    text = os.fspath(config)
    if os.path.isfile(text):
        if os.path.getsize(text) > _MAX_BYTES:
            raise Error(
                f"[deepspeed] {text} has more than {_MAX_BYTES} bytes; it is no settings file"
            )
        with open(text, encoding="utf-8") as file:
            return _renamed(parse(file.read(), text))
    if text.lstrip().startswith(("{", "/", "#")) and "{" in text:
        return _renamed(parse(text, "the given text"))
    try:
        decoded = base64.urlsafe_b64decode(text.encode()).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        raise Error(
            f"[deepspeed] there is no file {text!r}; give a path, a dictionary or JSON"
        ) from None
    return _renamed(parse(decoded, "the given base64 text"))


def parse(text: str, place: str) -> dict[str, Any]:
    """JSON with //, # and /* */ comments and last commas; a repeated key is an error."""
    plain = _COMMENT.sub(lambda m: m.group(1) or " ", text)
    plain = _LAST_COMMA.sub(lambda m: m.group(1) or m.group(2), plain)
    try:
        read = json.loads(plain, object_pairs_hook=_once)
    except RecursionError:
        raise Error(f"[deepspeed] {place} is nested too deeply; it is no settings file") from None
    except json.JSONDecodeError as error:
        raise Error(f"[deepspeed] {place} is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise Error(f"[deepspeed] {place} is a {type(read).__name__}; settings are one {{...}}")
    return read


def read(config: Any, ranks: int = 1) -> Settings:
    """Raises Error on an unknown key, a refused value, and batch numbers that contradict each other."""
    given = load(config)
    settings = Settings()
    values = settings.values
    for path, value in _leaves(given):
        key = _key_of(path)
        if isinstance(value, str) and value == AUTO:
            settings.auto.append(path)
        elif key.fate == "mapped":
            values[path] = value
        elif key.fate == "noted":
            settings.notes[path] = key
        elif not _is_harmless(value, key):
            raise Error(f"[deepspeed] {path} is {json.dumps(value)}: {key.text}")
    _batch(values, ranks, settings)
    _precision(values, settings)
    _zero(values, settings)
    settings.engine.setdefault("optimizer", {})["max_grad_norm"] = _number(
        values, "gradient_clipping", 0.0
    )
    settings.optimizer = _typed(values, "optimizer", settings)
    settings.scheduler = _typed(values, "scheduler", settings)
    settings.drop_last = bool(values.get("dataloader_drop_last", False))
    every = _number(values, "steps_per_print", 0)
    # accelerate's infinity: never.
    settings.steps_per_print = int(every) if math.isfinite(every) else 0
    settings.monitor = _monitor(values)
    return settings


def _batch(values: dict[str, Any], ranks: int, settings: Settings) -> None:
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    total, micro, steps = (_count(values, name) for name in names)
    if total is not None and (micro is not None or steps is not None):
        part = (micro or 1) * (steps or 1) * ranks
        if total % part or (micro is not None and steps is not None and total != part):
            shown = f"{micro or '?'} x {steps or '?'} x {ranks}"
            raise Error(
                f"[deepspeed] train_batch_size is {total}, but train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps x ranks is {shown} = "
                f"{part if micro and steps else f'a multiple of {part}'}; change one of them"
            )
    if total is not None and micro is None and steps is None:
        if total % ranks:
            raise Error(
                f"[deepspeed] train_batch_size is {total} on {ranks} ranks; it must be a multiple "
                "of them"
            )
        micro, steps = total // ranks, 1
    elif total is not None and micro is None:
        micro = total // (steps * ranks)
    elif total is not None and steps is None:
        steps = total // (micro * ranks)
    settings.micro_batch = micro
    settings.engine["batch"] = {"micro_batch_size": micro or 1, "accumulation": steps or 1}


def _precision(values: dict[str, Any], settings: Settings) -> None:
    on = [s for s in ("fp16", "bf16", "torch_autocast") if values.get(f"{s}.enabled")]
    if len(on) > 1:
        raise Error(f"[deepspeed] {on[0]}.enabled and {on[1]}.enabled are both on; choose one")
    if not on:
        return
    if on[0] == "torch_autocast":
        names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
        asked = str(values.get("torch_autocast.dtype", "bfloat16")).replace("torch.", "")
        if asked not in names:
            raise Error(f"[deepspeed] torch_autocast.dtype is {asked!r}; use bfloat16 or float16")
        settings.engine["precision"] = {"dtype": names[asked]}
        return
    precision: dict[str, Any] = {"dtype": on[0], "parameters": on[0]}
    if on[0] == "fp16":
        precision |= _FP16
        for key in TABLE:
            if key.path.startswith("fp16.") and key.path != "fp16.enabled" and key.path in values:
                value = _number(values, key.path, 0)
                name = key.to.split(".")[1]
                precision[name] = key.convert(value) if key.convert else value
        if precision.get("loss_scale") == 0:
            del precision["loss_scale"]
    settings.engine["precision"] = precision
    if on[0] == "bf16" and values.get("bf16.bf16_optimizer_states"):
        settings.engine.setdefault("optimizer", {})["moments"] = "bf16"


def _zero(values: dict[str, Any], settings: Settings) -> None:
    zero: dict[str, Any] = {}
    for key in TABLE:
        if key.to.startswith("zero.") and values.get(key.path) is not None:
            value = values[key.path]
            zero[key.to.split(".")[1]] = key.convert(value) if key.convert else value
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise Error(f"[deepspeed] zero_optimization.stage is {stage!r}; use 0, 1, 2 or 3")
    if zero.get("gradient_dtype") not in (None, "fp32", "bf16"):
        raise Error(
            f"[deepspeed] communication_data_type is {zero['gradient_dtype']!r}; gradients travel "
            "as fp32 or bf16"
        )
    threshold = zero.pop("persistence_threshold", None)
    if threshold is not None and stage == 3:
        zero["persistence_threshold"] = int(threshold)
    zero.pop("shard_group_size", None)
    if size := _shard_group_size(values):
        zero["shard_group_size"] = size
    settings.engine["offload"] = _offload(values, stage)
    settings.engine["zero"] = zero


def _shard_group_size(values: dict[str, Any]) -> int:
    """0: all ranks."""
    mics = int(_number(values, "zero_optimization.mics_shard_size", -1))
    hpz = int(_number(values, "zero_optimization.zero_hpz_partition_size", 1))
    mics, hpz = max(mics, 0), hpz if hpz > 1 else 0
    if mics and hpz and mics != hpz:
        raise Error(
            f"[deepspeed] zero_optimization.mics_shard_size is {mics} and zero_hpz_partition_size "
            f"{hpz}: both say how many ranks shard among themselves; keep one of them"
        )
    return mics or hpz


def _offload(values: dict[str, Any], stage: int) -> dict[str, Any]:
    for what in ("optimizer", "param"):
        path = f"zero_optimization.offload_{what}.device"
        device = values.get(path) or "none"
        if device not in ("none", "cpu", "nvme"):
            raise Error(f"[deepspeed] {path} is {device!r}; use none, cpu or nvme")
        if what == "param" and device != "none" and stage != 3:
            raise Error(
                f"[deepspeed] {path} is {device} at stage {stage}, where parameters are not sharded; "
                "set zero_optimization.stage to 3, or leave it out"
            )
    offload: dict[str, Any] = {}
    for key in TABLE:
        if key.to.startswith("offload.") and values.get(key.path) is not None:
            value = values[key.path]
            offload[key.to.split(".")[1]] = key.convert(value) if key.convert else value
    places = (offload.get("optimizer", "none"), offload.get("parameters", "none"))
    if "file" in places and not offload.get("directory"):
        raise Error(
            "[deepspeed] zero_optimization.offload_optimizer or offload_param has device nvme without "
            "nvme_path; give a folder on a fast disk"
        )
    if "file" not in places:  # what only files ask for
        for name in ("directory", "block_bytes", "queue_depth"):
            offload.pop(name, None)
    if places[0] == "none":
        offload.pop("optimizer_fraction", None)
    return offload


def _monitor(values: dict[str, Any]) -> DeepSpeedMonitorConfig:
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, value in values.items():
        section, _, name = path.partition(".")
        if section in sections:
            sections[section][name] = value
    return get_monitor_config(sections)


def _typed(
    values: dict[str, Any], section: str, settings: Settings
) -> tuple[str, dict[str, Any]] | None:
    prefix = f"{section}.params."
    params = {p[len(prefix) :]: v for p, v in values.items() if p.startswith(prefix)}
    kind = values.get(f"{section}.type")
    if kind is None:
        if params:
            raise Error(f"[deepspeed] {section}.params without {section}.type; give the type")
        return None
    if not isinstance(kind, str):
        raise Error(f"[deepspeed] {section}.type is {kind!r}; give a name")
    return kind, params


def _leaves(
    given: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Paths with their values; a section that the table has as a whole is one."""
    if depth > _MAX_DEPTH:
        raise Error(f"[deepspeed] {prefix[:40]}... is nested too deeply; it is no settings file")
    for name, value in given.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in _KEYS and f"{path}.*" not in _KEYS:
            if not value:
                continue
            _check_section(path)
            yield from _leaves(value, f"{path}.", depth + 1)
        elif isinstance(value, Mapping) and f"{path}.*" in _KEYS:
            if value.get("enabled") is False:
                continue
            yield from ((f"{path}.{entry}", inner) for entry, inner in value.items())
        else:
            yield path, value


def _key_of(path: str) -> Key:
    if path in _KEYS:
        return _KEYS[path]
    section = path
    while "." in section:
        section = section.rsplit(".", 1)[0]
        if f"{section}.*" in _KEYS:
            return _KEYS[f"{section}.*"]
    raise Error(f"[deepspeed] unknown key {path}; did you mean {_nearest(path)}?")


def _check_section(path: str) -> None:
    if not any(known.startswith(f"{path}.") for known in _KEYS):
        raise Error(f"[deepspeed] unknown section {path}; did you mean {_nearest(path)}?")


def _nearest(path: str) -> str:
    return difflib.get_close_matches(path, [k.removesuffix(".*") for k in _KEYS], 1, 0.0)[0]


def _is_harmless(value: Any, key: Key) -> bool:
    if isinstance(value, Mapping):  # a section that is switched off
        return not value or value.get("enabled") is False or value.get("autotp_size") in (0, 1)
    return any(type(value) is type(fine) and value == fine for fine in key.harmless) or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value in key.harmless
    )


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    zero = given.get("zero_optimization")
    if isinstance(zero, bool):  # of the first versions
        given["zero_optimization"] = {"stage": 1 if zero else 0}
    for old, new in OLD_NAMES.items():
        _move(given, old, new)
    for old, (section, value) in OLD_SWITCHES.items():
        if _pop(given, old) is True and section:
            _put(given, section, value)
    return given


def _move(given: dict[str, Any], old: str, new: str) -> None:
    value = _pop(given, old)
    if value is not None:
        logger.info("[deepspeed] %s is called %s now", old, new)
        _put(given, new, value)


def _pop(given: dict[str, Any], path: str) -> Any:
    *sections, name = path.split(".")
    for section in sections:
        given = given.get(section)
        if not isinstance(given, dict):
            return None
    return given.pop(name, None)


def _put(given: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        given = given.setdefault(section, {})
    if name in given and given[name] != value and not isinstance(value, dict):
        raise Error(f"[deepspeed] {path} is given twice, by its old name too")
    given.setdefault(name, value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Error(f"[deepspeed] the key {twice!r} is given twice")
    return dict(pairs)


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Error(f"[deepspeed] {name} is {value!r}; give an integer of 1 or more")
    return value


def _number(values: dict[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Error(f"[deepspeed] {name} is {value!r}; give a number")
    return value


_KEYS = {key.path: key for key in TABLE}
