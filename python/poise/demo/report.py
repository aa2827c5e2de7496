"""The report: one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from poise.demo import table
from poise.demo.findings import Findings
from poise.demo.outcome import Outcome

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86rem; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right;
         vertical-align: top; font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
.text { text-align: left; } .error { min-width: 18rem; color: #8a2f00; }
.good, .bad { padding: 0.6rem 1rem; border-left: 6px solid; }
.good { border-color: #0072B2; background: #eef5fa; }
.bad { border-color: #D55E00; background: #fdf1ea; }
img { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; white-space: pre-wrap; }
"""
CAPTIONS = {
    "losses.png": "Rows of one length, and the 16-bit rows, which stop after a few updates. Below: "
    "how far each fp32 row is from the first, and what is allowed.",
    "memory.png": "What a rank held at the moment of its highest total. Accumulation shrinks the "
    "activations of a micro-batch, recomputing keeps only what blocks hand on, the chunked loss "
    "never holds all logits; parameters, gradients and optimizer states stay, unless ranks share them.",
    "times.png": "Accumulation and recomputing save memory, not time. CPUs without 16-bit matrix "
    "instructions are slow in bf16 and fp16; GPUs are not.",
}


def page(
    outcomes: Sequence[Outcome],
    found: Findings,
    plots: Mapping[str, Path],
    machine: Mapping[str, str],
    rerun: str,
) -> str:
    """The page as text; every value from outside is escaped.

    Args:
      outcomes: the rows.
      found: the words.
      plots: PNG files by title.
      machine: facts by name.
      rerun: the command that makes the report again.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>poise demo</title><style>{STYLE}</style></head><body>",
        "<h1>One training, done in several ways</h1>",
        "<p>A byte-level GPT learns the source of the Python standard library. Seed, data, order "
        "and global batch are the same in every row; only how an update is split, stored and "
        "recomputed differs, so the losses must not.</p>",
        _words(found),
        "<h2>Rows</h2>",
        _table(outcomes),
        *(_plot(title, path) for title, path in plots.items()),
        "" if plots else "<p>No plots: matplotlib is not installed.</p>",
        *_samples(outcomes),
        "<h2>Machine</h2>",
        _facts(machine),
        "<h2>Run it again</h2>",
        f"<pre>{escape(rerun)}</pre>",
        "<p>One row alone, with the settings that its folder keeps:</p>",
        f"<pre>{escape(chr(10).join(entry.command for entry in outcomes if entry.command))}</pre>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _words(found: Findings) -> str:
    blocks = []
    for kind, sentences in (("bad", found.problems), ("good", found.words)):
        if sentences:
            lines = "<br>\n".join(escape(sentence) for sentence in sentences)
            blocks.append(f'<p class="{kind}">{lines}</p>')
    return "\n".join(blocks)


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [_table_line("th", table.HEADINGS)]
    lines += [_table_line("td", table.cells(outcome)) for outcome in outcomes]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _table_line(tag: str, texts: Sequence[str]) -> str:
    cells = []
    for name, text in zip(table.HEADINGS, texts, strict=True):
        words = (["text"] if name in table.TEXT_COLUMNS else []) + (
            ["error"] if name == "error" and text and tag == "td" else []
        )
        kind = f' class="{" ".join(words)}"' if words else ""
        cells.append(f"<{tag}{kind}>{escape(text)}</{tag}>")
    return "<tr>" + "".join(cells) + "</tr>"


def _plot(title: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f"<h2>{escape(title)}</h2>\n<p>{escape(CAPTIONS.get(path.name, ''))}</p>\n"
        f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
    )


def _samples(outcomes: Sequence[Outcome]) -> list[str]:
    parts = []
    for entry in outcomes:
        if entry.sample:
            parts.append(f"<h2>What the model writes after {len(entry.losses)} updates</h2>")
            parts.append("<p>It was given this text, which it had not seen:</p>")
            parts.append(f"<pre>{escape(entry.prompt or '')}</pre>\n<p>and went on:</p>")
            parts.append(f"<pre>{escape(entry.sample)}</pre>")
    return parts


def _facts(machine: Mapping[str, str]) -> str:
    lines = [
        f'<tr><th class="text">{escape(name)}</th><td class="text">{escape(value)}</td></tr>'
        for name, value in machine.items()
    ]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
