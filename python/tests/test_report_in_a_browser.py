"""The page of `poise report` as a browser draws it: curves, events and words, found among the pixels."""

import json
import os
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest
from poise import cli

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="no chromium on this machine; setup/packages_tests.txt has it for Debian",
)
WIDTH, HEIGHT = 800, 1600
SPIKE, SKIPPED = 60, 80
BLUE = (31, 111, 235)


def run_of(folder):
    """Metrics of 100 updates whose loss falls in a line, but for a spike; one update is skipped."""
    lines = []
    for step in range(1, 101):
        line = {"step": step, "loss": 4 - 0.03 * step, "peak_bytes": 1 << 21, "status": "applied"}
        line["accounts"] = {"parameters": 3 << 10, "activations": 1 << 10}
        if step == SPIKE:
            line["loss"] += 3.0
            line["spikes"] = [f"update {step}: loss 5.2 is 9.0 standard deviations above the mean"]
        if step == SKIPPED:
            line |= {"loss": "NaN", "status": "nonfinite_loss"}
        lines.append(line)
    plan = {"predicted": {"activations": 2000}, "measured": {"activations": 1500}}
    lines.append({"step": 1, "plan": plan})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [(line["step"], line["loss"]) for line in lines if isinstance(line.get("loss"), float)]


def browse(folder, *options):
    own = {**os.environ, "HOME": str(folder), "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={folder / 'browser'}", f"--window-size={WIDTH},{HEIGHT}", *options,
        (folder / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def near(pixels, color):
    """Where pixels have about this color."""
    return (np.abs(pixels - np.array(color) / 255).max(axis=-1)) < 0.25


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(points of the loss, pixels, the document after it was drawn)"""
    folder = tmp_path_factory.mktemp("report")
    points = run_of(folder)
    assert cli.main(["report", str(folder)]) == 0
    browse(folder, f"--screenshot={folder / 'page.png'}")
    pixels = matplotlib.image.imread(folder / "page.png")[..., :3]
    return points, pixels, browse(folder, "--dump-dom")


def curves(pixels):
    """Rows (first, last) of each curve, from the top: blue with no blue above and below."""
    rows = np.flatnonzero(near(pixels, BLUE).any(axis=1))
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 40) + 1)
    return [(part[0], part[-1]) for part in parts]


def test_the_loss_is_drawn_where_its_values_are(drawn):
    points, pixels, _ = drawn
    top, bottom = curves(pixels)[0]
    blue = near(pixels[top : bottom + 1], BLUE)
    columns = np.flatnonzero(blue.any(axis=0))
    left, right = columns[0], columns[-1]
    assert right - left > WIDTH / 2
    values = [value for _, value in points]
    low, high = min(values), max(values)
    for step, value in points:
        if abs(step - SPIKE) <= 2 or step in (SKIPPED - 1, SKIPPED + 1):
            continue  # steep, or under the line of an event
        column = round(left + (step - 1) / 99 * (right - left))
        drawn_at = np.flatnonzero(blue[:, column]).mean()
        expected = (high - value) / (high - low) * (bottom - top)
        assert drawn_at == pytest.approx(expected, abs=2.5), step
    peak = round(left + (SPIKE - 1) / 99 * (right - left))
    assert blue[:4, peak - 2 : peak + 3].any()  # the highest of all


def test_events_stand_at_their_updates(drawn):
    _, pixels, _ = drawn
    top, bottom = curves(pixels)[0]
    columns = np.flatnonzero(near(pixels[top : bottom + 1], BLUE).any(axis=0))
    left, right = columns[0], columns[-1]
    colors = pixels[top : bottom + 1]
    reddish = colors[..., 0] - colors[..., 1:].max(axis=-1) > 0.15  # thin lines are blended
    red = np.flatnonzero(reddish.sum(axis=0) > 10)
    for step in (SPIKE, SKIPPED):
        at = left + (step - 1) / 99 * (right - left)
        assert np.abs(red - at).min() <= 2
        red = red[np.abs(red - at) > 2]
    assert red.size == 0


def test_curves_lie_below_each_other_and_words_are_drawn(drawn):
    _, pixels, document = drawn
    assert len(curves(pixels)) == 2  # loss and peak bytes
    ink = pixels.max(axis=-1) < 0.5
    assert ink[: curves(pixels)[0][0]].sum() > 500  # heading and summary
    last = curves(pixels)[1][1]
    assert ink[last:].sum() > 500  # memory, plan and events
    assert not ink[:, -4:].any()  # nothing reaches over the edge
    for words in (
        "Plan against measured",
        "-25.0%",
        f"update {SKIPPED}",
        "9.0 standard deviations",
    ):
        assert words in document
