"""The plots of the report, as PNG files. Without matplotlib there are none, and the report says so.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; curves that lie on
each other also differ in dashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poise.demo.agreement import EARLY_BOUND, EARLY_UPDATES, LATE_BOUND, relative_differences
from poise.demo.outcome import MIB, Outcome, fp32_curves

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
ACCOUNT_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#56B4E9",
    "staging": "#CC79A7",
    "communication": "#F0E442",
    "gathered": "#D55E00",
    "other": "#999999",
}
SMALLEST_SHOWN = 1e-9  # of a relative difference: equal to the bit lies on the lower edge


def draw_all(outcomes: Sequence[Outcome], folder: Path) -> dict[str, Path]:
    """Draws the plots; returns their files by title. Empty without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots = {
        "Loss curves over each other": (_losses, "losses.png"),
        "Memory at the peak, by account": (_memory, "memory.png"),
        "Time per update": (_times, "times.png"),
    }
    files = {}
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        for title, (draw, name) in plots.items():
            figure = draw(plt, outcomes)
            if figure is None:
                continue
            files[title] = folder / name
            figure.savefig(files[title], dpi=130, bbox_inches="tight")
            plt.close(figure)
    return files


def _losses(plt, outcomes: Sequence[Outcome]):
    """The curves of the rows of one length, and below them how far fp32 ones are from the first."""
    curves = [entry for entry in outcomes if entry.losses and entry.row.kind in ("parity", "half")]
    if not curves:
        return None
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 7.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    parity = fp32_curves(curves)
    for i, entry in enumerate(curves):
        updates = range(1, len(entry.losses) + 1)
        look = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
            "linewidth": 3.5 if i == 0 else 1.6,
            "alpha": 0.35 if i == 0 else 1,
        }
        if entry.row.kind == "half":
            look |= {"marker": "os^v"[i % 4], "markersize": 5, "markerfacecolor": "none"}
        upper.plot(updates, entry.losses, label=entry.row.title, **look)
        if entry in parity[1:]:
            differences = relative_differences(entry.losses, parity[0].losses)
            lower.plot(updates, [max(d, SMALLEST_SHOWN) for d in differences], **look)
    upper.set_title("Loss of the same training, done in different ways", loc="left")
    upper.set_ylabel("training loss (nats per byte)")
    upper.legend(fontsize=8, frameon=False, ncols=2)
    upper.grid(alpha=0.25)
    _draw_bounds(lower, max(len(entry.losses) for entry in curves))
    return figure


def _draw_bounds(axes, updates: int) -> None:
    """What the check allows, as steps over the differences."""
    edges = [0.5, EARLY_UPDATES + 0.5, max(updates, EARLY_UPDATES + 1) + 0.5]
    axes.stairs(
        [EARLY_BOUND, LATE_BOUND],
        edges,
        color="#D55E00",
        linewidth=1.5,
        label="allowed",
        baseline=None,
    )
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST_SHOWN / 2, LATE_BOUND * 10)
    axes.set_title("Relative difference of the fp32 rows to the first row", loc="left")
    axes.set_xlabel("update")
    axes.set_ylabel(f"|difference| / loss\n({SMALLEST_SHOWN:.0e}: or less)")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.grid(alpha=0.25)


def _memory(plt, outcomes: Sequence[Outcome]):
    """Stacked bars; that of a row that ran out of memory is what it held until then."""
    shown = [entry for entry in outcomes if entry.accounts or entry.budget_bytes]
    if not any(entry.accounts for entry in shown):
        return None
    figure, axes = _bars(plt, shown, "Memory at the peak, by account", "MiB")
    lefts = [0.0] * len(shown)
    for name, colour in ACCOUNT_COLOURS.items():
        sizes = [entry.accounts.get(name, 0) / MIB for entry in shown]
        if not any(sizes):
            continue
        look = {"color": colour, "edgecolor": "white", "linewidth": 0.6}
        axes.barh(range(len(shown)), sizes, left=lefts, label=name, **look)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    for i, (entry, total) in enumerate(zip(shown, lefts, strict=True)):
        budget = entry.budget_bytes / MIB
        if budget:
            axes.plot([budget, budget], [i - 0.46, i + 0.46], color="black", linewidth=2.5)
        text = " out of memory" if entry.error else f" {total:.1f}"
        axes.text(max(total, budget if entry.error else 0), i, text, va="center", fontsize=9)
    if any(entry.budget_bytes for entry in shown):
        axes.plot([], [], color="black", linewidth=2.5, label="budget of the row")
    axes.set_xlim(0, max(lefts) * 1.1)
    figure.legend(loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    return figure


def _times(plt, outcomes: Sequence[Outcome]):
    """The median of each row, and its updates one by one; 16-bit bars may run off the edge."""
    shown = [entry for entry in outcomes if entry.update_seconds]
    if not shown:
        return None
    figure, axes = _bars(plt, shown, "Time per update", "milliseconds")
    colours = {"cpp": COLOURS[2], "python": COLOURS[1]}
    fp32 = [entry for entry in shown if entry.row.precision == "fp32"] or shown
    edge = 1.6 * max(1000 * (entry.seconds_per_update or 0) for entry in fp32)
    for i, entry in enumerate(shown):
        times = [1000 * seconds for seconds in entry.update_seconds[1:] or entry.update_seconds]
        median = 1000 * (entry.seconds_per_update or 0)
        axes.barh(i, median, color=colours[entry.row.language])
        marks = {"color": "black", "alpha": 0.35, "markersize": 6}
        axes.plot(times, [i + 0.2] * len(times), "|", **marks)
        text, end, side = f" {median:,.0f}", median, "left"
        if median > edge:
            text, end, side = f"{median:,.0f} \N{RIGHTWARDS ARROW} ", edge, "right"
        axes.text(end, i - 0.2, text, va="center", ha=side, fontsize=9)
    for language, colour in colours.items():
        name = "C++" if language == "cpp" else "Python"
        axes.barh([0], [0], color=colour, label=f"median ({name})")
    axes.plot([], [], "|", color="black", alpha=0.5, label="single updates, without the first")
    axes.set_xlim(0, edge)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _bars(plt, shown: Sequence[Outcome], title: str, unit: str):
    """An empty plot with one line for each row, the first on top as in the table."""
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.4 * len(shown)), layout="constrained")
    axes.set_yticks(range(len(shown)), [entry.row.title for entry in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes
