"""`poise report DIR`: the page shows what metrics.jsonl says, and needs nothing but itself."""

import json
import re
from html.parser import HTMLParser

import poise
import pytest
from poise import cli, report


class Page(HTMLParser):
    """Texts, drawn lines, and whatever a page could load."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.curves, self.loads, self.open = [], [], [], []
        self.feed(text)
        assert self.open == [], "a tag was not closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loads += [v for k, v in attributes.items() if k in ("src", "href")]
        if tag == "polyline":
            points = attributes["points"].split()
            self.curves.append([tuple(map(float, point.split(","))) for point in points])
        if tag not in ("meta", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


LINES = [
    {"step": 1, "loss": 4.0, "grad_norm": 1.0, "tokens": 10, "peak_bytes": 1 << 20, "skipped": 0,
     "status": "applied", "accounts": {"parameters": 3 << 10, "activations": 1 << 10}},
    {"step": 2, "loss": 2.0, "grad_norm": "NaN", "tokens": 20, "peak_bytes": 1 << 21, "skipped": 1,
     "status": "nonfinite_gradient", "first_bad_parameter": "<b>head</b>"},
    {"step": 4, "loss": 1.0, "grad_norm": 3.0, "tokens": 1234567, "peak_bytes": 1 << 21,
     "skipped": 1, "status": "applied"},
    {"step": 4, "eval_loss": 1.5},
]  # fmt: skip


def test_curves_are_the_lines_values():
    page = Page(report.page(LINES, "mine"))
    losses = page.curves[0]
    assert len(losses) == 3
    xs, ys = zip(*losses, strict=True)
    assert xs[1] - xs[0] == pytest.approx((xs[2] - xs[0]) / 3, abs=0.2)  # steps 1, 2, 4
    assert ys[0] < ys[1] < ys[2]  # a smaller loss is drawn lower
    assert (ys[2] - ys[1]) / (ys[2] - ys[0]) == pytest.approx(1 / 3, abs=0.01)
    norms = page.curves[2]
    assert len(norms) == 2  # NaN is no point


@pytest.mark.parametrize(
    "value", [0.0003125, 12720.4, 123456.7, 7.7e9, 1.5e-9, -0.000123456, 999.96]
)
def test_numbers_beside_a_curve_fit_their_margin(value):
    page = Page(report.curve([(1, value), (2, 2 * value)], key="tokens_per_second"))
    assert max(map(len, page.texts)) <= 9  # of about 7 units each, in 66


def test_numbers_memory_and_events_are_told_and_escaped():
    text = report.page(LINES, "a <run>")
    page = Page(text)
    words = " ".join(page.texts)
    assert "a <run>" in words and "<run>" not in text
    assert "1,234,567" in words and "4 to 1" in words
    assert "parameters 3.00 KiB" in words and "all 4.00 KiB" in words
    assert "nonfinite_gradient in <b>head</b>: not applied" in words
    assert "<b>head" not in text
    assert 'class="event"' in text


def test_the_page_loads_nothing():
    text = report.page(LINES, "mine")
    assert Page(text).loads == [] and not re.search(r"https?://|<script|@import|url\(", text)


def test_the_command_writes_it_beside_the_metrics(tmp_path, capsys):
    lines = "\n".join(json.dumps(line) for line in LINES)
    (tmp_path / "metrics.jsonl").write_text(lines + '\n{"step": 5, "lo')  # cut off
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert len(Page((tmp_path / "report.html").read_text()).curves) == 4


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(poise.Error, match="has no line"):
        report.read(tmp_path)
