"""`poise report DIR`: a run's metrics as one HTML page that needs nothing but itself."""

from __future__ import annotations

import argparse
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poise._C import Error, format_bytes

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 72, 24
CURVES = (  # key of a line, title
    ("loss", "loss"),
    ("eval_loss", "loss of evaluations"),
    ("validation_loss", "loss of validations"),
    ("grad_norm", "norm of the gradient, before clipping"),
    ("clipped_norm", "norm of the gradient, after clipping"),
    ("learning_rate", "learning rate"),
    ("lr", "learning rate"),
    ("tokens_per_second", "tokens per second"),
    ("mfu", "model FLOPs utilization"),
    ("peak_bytes", "peak bytes"),
    ("loss_scale", "loss scale"),
)
_FIGURES = (  # of a run's last line: key, name, form
    ("train_runtime", "time", "{:,.1f} s"),
    ("train_samples_per_second", "samples per second", "{:,.4g}"),
    ("train_tokens_per_second", "tokens per second", "{:,.4g}"),
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 44rem; padding: 0 1rem;
  color: #222; background: #fff; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #555; }
polyline { fill: none; stroke: #1f6feb; stroke-width: 1.6; }
.grid { stroke: #ddd; } .event { stroke: #d1242f; stroke-dasharray: 3 3; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
"""

Points = list[tuple[float, float]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="poise report", description="Writes a page of a run's curves, memory and events."
    )
    parser.add_argument("folder", help="output_dir of a run, with its metrics.jsonl")
    parser.add_argument("--out", help="file to write; default: report.html in the folder")
    options = parser.parse_args(arguments)
    folder = Path(options.folder)
    out = Path(options.out) if options.out else folder / "report.html"
    out.write_text(page(read(folder), folder.name or str(folder)), encoding="utf-8")
    print(out)
    return 0


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that was cut off at the end is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise Error(f"[report] there is no {path}; give the output_dir of a run")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict):
            raise Error(f"[report] line {number} of {path} is no object")
        lines.append(line)
    if not lines:
        raise Error(f"[report] {path} has no line; the run was not begun")
    return lines


def page(lines: list[dict[str, Any]], title: str) -> str:
    """The page of a run's lines."""
    events = _events(lines)
    marks = [step for step, _ in events]
    parts = [f"<h1>{html.escape(title)}</h1>", _summary(lines)]
    drawn = set()
    for key, name in CURVES:
        points = points_of(lines, key)
        if points and name not in drawn:
            drawn.add(name)
            parts.append(f"<h2>{name}</h2>{curve(points, marks, key)}")
    parts += [_memory(lines), _plan(lines)]
    parts.append("<h2>Events</h2>" + (_event_list(events) or "<p>none</p>"))
    parts.append(_samples(lines))
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def points_of(lines: list[dict[str, Any]], key: str) -> Points:
    """(step, value) of the lines that have a finite one."""
    pairs = [(line.get("step", line.get("update")), line.get(key)) for line in lines]
    return [(float(x), float(y)) for x, y in pairs if _is_finite(x) and _is_finite(y)]


def curve(points: Points, marks: Sequence[float] = (), key: str = "") -> str:
    """A line through the points as an SVG element; `marks` are steps that something happened at."""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1)
        up = (y - low) / ((high - low) or 1)
        return (
            LEFT + across * (WIDTH - LEFT - 8),
            8 + (1 - up) * (HEIGHT - BOTTOM - 8),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in (low, (low + high) / 2, high):
        y = place(first, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_shown(value, key)}</text>'
        )
    for x, anchor in ((first, "start"), (last, "end")):
        at = place(x, low)[0]
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{x:g}</text>')
    for mark in marks:
        if first <= mark <= last:
            x = place(mark, low)[0]
            parts.append(
                f'<line class="event" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{HEIGHT - BOTTOM}"/>'
            )
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts.append(f'<polyline points="{drawn}"/></svg>')
    return "".join(parts)


def _summary(lines: list[dict[str, Any]]) -> str:
    losses = points_of(lines, "loss")
    rows = [("updates", f"{max((x for x, _ in losses), default=0):g}")]
    if losses:
        rows.append(("loss", f"{losses[0][1]:.4g} to {losses[-1][1]:.4g}"))
    tokens = points_of(lines, "tokens")
    if tokens:
        rows.append(("tokens", f"{tokens[-1][1]:,.0f}"))
    peak = points_of(lines, "peak_bytes")
    if peak:
        rows.append(("peak", format_bytes(int(max(y for _, y in peak)))))
    share = points_of(lines, "memory_percent")
    if share:
        rows.append(("of the memory there is", f"{max(y for _, y in share):.3g} %"))
    for key, name, text in _FIGURES:
        if figures := points_of(lines, key):
            rows.append((name, text.format(figures[-1][1])))
    skipped = points_of(lines, "skipped")
    rows.append(("skipped updates", f"{max((y for _, y in skipped), default=0):g}"))
    return _table(rows)


def _memory(lines: list[dict[str, Any]]) -> str:
    with_accounts = [line for line in lines if isinstance(line.get("accounts"), dict)]
    if not with_accounts:
        return ""
    at = max(with_accounts, key=lambda line: sum(line["accounts"].values()))
    accounts = sorted(at["accounts"].items(), key=lambda item: -item[1])
    rows = [(name, format_bytes(int(size))) for name, size in accounts if size]
    rows.append(("all", format_bytes(int(sum(at["accounts"].values())))))
    return f"<h2>Memory at the peak, by account</h2>{_table(rows)}"


def _plan(lines: list[dict[str, Any]]) -> str:
    """What was predicted before the first update beside what it took."""
    plan = next((line["plan"] for line in lines if isinstance(line.get("plan"), dict)), None)
    if plan is None:
        return ""
    foretold, predicted, measured = (
        {"all": sum(part.values()), **part}
        for part in (plan.get(k, {}) for k in ("foretold", "predicted", "measured"))
    )
    first = foretold["all"] > 0  # else what was planned stands for it
    rows = []
    for name in {**predicted, **measured}:
        a, b = predicted.get(name, 0), measured.get(name, 0)
        if a or b:
            off = f"{b / a - 1:+.1%}" if a else ""
            before = [format_bytes(int(foretold.get(name, 0)))] if first else []
            rows.append((name, *before, format_bytes(int(a)), format_bytes(int(b)), off))
    a, b = plan.get("predicted_seconds", 0), plan.get("measured_seconds", 0)
    if a and b:
        before = [""] if first else []
        rows.append(("time", *before, f"{a:.3g} s", f"{b:.3g} s", f"{b / a - 1:+.1%}"))
    before = ["before anything was allocated"] if first else []
    head = ("account", *before, "planned", "measured", "")
    return f"<h2>Plan against measured, at the peak of update 1</h2>{_table(rows, head)}"


def _samples(lines: list[dict[str, Any]]) -> str:
    """What the model said, the latest first."""
    told = [(line["step"], text) for line in lines for text in line.get("samples", ())]
    rows = (
        f"<tr><th>update {step:g}</th><td>{html.escape(str(text))}</td></tr>"
        for step, text in reversed(told)
    )
    return f"<h2>Samples</h2><table>{''.join(rows)}</table>" if told else ""


def _events(lines: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """What happened besides updates that were applied."""
    found = []
    for line in lines:
        step, status = line.get("step", line.get("update")), line.get("status", "applied")
        if not _is_finite(step):
            continue
        if status != "applied":
            name = line.get("first_bad_parameter")
            found.append((float(step), f"{status}{f' in {name}' if name else ''}: not applied"))
        elif "loss" in line and not _is_finite(line["loss"]):
            found.append((float(step), f"loss {line['loss']}"))
        for text in line.get("spikes", ()):
            at, _, what = str(text).removeprefix("update ").partition(": ")
            found.append((float(at) if at.isdigit() else float(step), what or text))
    return found


def _event_list(events: list[tuple[float, str]]) -> str:
    rows = (
        f"<tr><th>update {step:g}</th><td>{html.escape(text)}</td></tr>" for step, text in events
    )
    return f"<table>{''.join(rows)}</table>" if events else ""


def _table(rows: list[tuple[str, ...]], head: Sequence[str] = ()) -> str:
    cells = ["".join(f"<th>{html.escape(name)}</th>" for name in head)]
    for name, *values in rows:
        numbers = "".join(f'<td class="n">{html.escape(value)}</td>' for value in values)
        cells.append(f"<th>{html.escape(name)}</th>{numbers}")
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells if row)}</table>"


def _shown(value: float, key: str) -> str:
    if key.endswith("bytes"):
        return format_bytes(int(value))
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _is_finite(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)
