"""`python -m poise.demo`: its checks, its files, and a whole quick run."""

import html.parser
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import poise.demo.__main__ as demo
import pytest
from poise.demo import DemoError, agreement, corpus, launch, plots, report, table
from poise.demo.findings import Findings, findings
from poise.demo.outcome import Outcome, budget_from, budget_of, outcome_of, summary
from poise.demo.rows import FULL, QUICK, Row, all_rows, choose_budget, quick_rows, run_settings

CURVE = [5.5 - 0.1 * i for i in range(12)]
FIELDS = {
    "name": str,
    "language": str,
    "ranks": int,
    "stage": int,
    "precision": str,
    "micro_batch": int,
    "accumulation": int,
    "checkpointing": str,
    "offload": str,
    "host_bytes": int,
    "file_bytes": int,
    "budget_bytes": int,
    "peak_bytes": (int, type(None)),
    "accounts": dict,
    "tokens_per_s": (float, type(None)),
    "losses": list,
    "val_loss": (float, type(None)),
    "error": (str, type(None)),
}


def outcome(row=None, losses=CURVE, **values):
    row = row or Row("plain big batch", "cpp")
    values = {"peak_bytes": 30 << 20, "accounts": {"activations": 30 << 20}} | values
    return Outcome(row, 16 // row.accumulation, 2048, losses=list(losses), **values)


# The check of the curves.


def test_equal_curves_agree():
    (entry,) = agreement.compare_all(CURVE, {"b": CURVE})
    assert entry.agrees and entry.early == entry.late == 0
    assert "agree" in agreement.in_words("a", [entry])[0]


@pytest.mark.parametrize(
    ("update", "relative", "agrees"),
    [(1, 9e-6, True), (5, 1.1e-5, False), (6, 9e-3, True), (6, 1.1e-2, False), (12, 2e-2, False)],
)
def test_bounds_of_the_check(update, relative, agrees):
    losses = list(CURVE)
    losses[update - 1] *= 1 + relative
    entry = agreement.compare("b", losses, CURVE)
    assert entry.agrees is agrees
    if not agrees:
        words = " ".join(agreement.in_words("a", [entry]))
        assert "DO NOT agree" in words and f"at update {update} " in words


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_losses_never_agree(bad):
    assert not agreement.compare("b", [*CURVE[:-1], bad], CURVE).agrees


def test_a_short_or_empty_curve_does_not_agree():
    assert "11 updates" in agreement.compare("b", CURVE[:-1], CURVE).problem
    assert not agreement.compare("b", [], CURVE).agrees


def test_a_failing_curve_is_a_problem_of_the_demo():
    off = [*CURVE[:3], CURVE[3] * 1.001, *CURVE[4:]]
    found = findings([outcome(), outcome(Row("accumulation 4", "python", 4), off)])
    text = " ".join(found.problems)
    assert "accumulation 4 (Python)" in text and "at update 4 " in text


def test_a_row_that_fails_and_one_that_must_but_does_not_are_problems():
    misfit = Row("plain, budget", "cpp", kind="misfit", budgeted=True)
    other = Row("accumulation 4", "cpp", 4)

    def problems(entry):
        return findings([outcome(), outcome(other), entry]).problems

    assert problems(outcome(misfit, [], error="out of memory: tried ...")) == []
    assert "should not fit" in problems(outcome(misfit, []))[0]
    assert "not for memory" in problems(outcome(misfit, [], error="no such file"))[0]
    assert "failed: boom" in problems(outcome(Row("x", "cpp"), [], error="boom"))[0]


def test_half_precision_rows_are_not_held_to_the_fp32_bounds():
    half = Row("bf16", "cpp", 4, "bf16", kind="half")
    other = outcome(Row("accumulation 4", "cpp", 4))
    assert findings([outcome(), other, outcome(half, [1.0, 2.0])]).problems == []


def sharded(*held):
    """A row on one rank and those of stages 1, 2, ... on two, with MiB of states in each."""
    rows = [Row("plain", "cpp")]
    rows += [Row(f"stage {n}", "cpp", ranks=2, stage=n) for n in range(1, len(held))]
    return [
        outcome(row, accounts={"optimizer": mib << 20, "activations": 5 << 20})
        for row, mib in zip(rows, held, strict=True)
    ]


def test_a_stage_that_shards_nothing_is_a_problem():
    found = findings(sharded(16, 12, 9, 8))
    assert found.problems == []
    assert "16.0 MiB on one rank and, on each of 2, 12.0 MiB at stage 1, 9.0" in found.words[-1]
    assert "9.0 MiB at stage 3" in findings(sharded(16, 12, 9, 9)).problems[0]


def test_states_that_were_not_trained_in_less_memory_are_a_problem():
    row = Row("hybrid", "cpp", 16, offload="all", states_over_budget=3)
    plain = outcome(accounts={"optimizer": 12 << 20, "activations": 5 << 20})

    def found(peak):
        budget = budget_of(row, [plain], 0)
        entry = outcome(row, peak_bytes=peak, budget_bytes=budget, host_bytes=9 << 20)
        return findings([plain, entry])

    assert budget_of(row, [plain], 0) == 4 << 20
    assert budget_of(plain.row, [], 7) == 0
    assert found(3 << 20).problems == []
    assert "states of 12.0 MiB trained in 4.0 MiB" in found(3 << 20).words[-1]
    assert "trained in 4.0 MiB" in found(5 << 20).problems[-1]


# The rows.


def test_every_row_trains_the_same_number_of_samples():
    for size in (FULL, QUICK):
        for row in all_rows():
            batch = run_settings(row, size, Path("c"), Path("o"), 1 << 20)["batch"]
            assert batch["micro_batch_size"] * batch["accumulation"] * row.ranks == size.samples
    assert FULL.tokens == 2048


def test_rows_differ_only_where_they_say():
    def same(row):
        settings = run_settings(row, FULL, Path("c"), Path("o"), 1 << 20)
        return {key: settings[key] for key in ("optimizer", "schedule", "engine", "data")}

    rows = [row for row in all_rows() if row.kind != "long"]
    assert all(same(row) == same(rows[0]) for row in rows)
    languages = {
        name: {r.language for r in rows if r.name == name}
        for name in ("plain big batch", "accumulation 4")
    }
    assert all(both == {"cpp", "python"} for both in languages.values())
    assert len({row.slug for row in all_rows()}) == len(all_rows())


def test_settings_are_known_to_the_runtime():
    import poise

    for row in all_rows():
        text = json.dumps(run_settings(row, FULL, Path("c"), Path("o"), 1 << 20))
        poise.Config.from_json(text)


def test_budget_lies_between_measured_peaks():
    assert 30 << 20 < choose_budget(100 << 20, 30 << 20) < 100 << 20
    with pytest.raises(DemoError, match="no budget lies between"):
        choose_budget(30 << 20, 30 << 20)
    lean = outcome(Row("lean", "cpp", 16), peak_bytes=10 << 20)
    assert 10 << 20 < budget_from([outcome(), lean]) < 30 << 20
    with pytest.raises(DemoError, match="boom"):
        budget_from([outcome(peak_bytes=None, error="boom"), lean])


# What is read and written.


def test_corpus_is_capped_and_the_same_every_time(tmp_path):
    assert corpus.write_corpus(tmp_path / "a", 200_000) == 200_000
    corpus.write_corpus(tmp_path / "b", 200_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert b"import " in (tmp_path / "a").read_bytes()


def test_corpus_leaves_out_what_machines_differ_in(tmp_path):
    for name in ("b.py", "a/z.py", "test/t.py", "site-packages/s.py", "note.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = [str(path.relative_to(tmp_path)) for path in corpus.source_files(tmp_path)]
    assert found == ["a/z.py", "b.py"]


def test_half_written_lines_and_missing_files_are_no_error(tmp_path):
    row, path = Row("plain big batch", "cpp"), tmp_path / "metrics.jsonl"
    assert outcome_of(row, FULL, 0, path).losses == []
    line = {"loss": 5.5, "tokens_per_second": 1024.0, "accounts": {"activations": 7, "other": 1}}
    path.write_text(json.dumps(line) + "\n" + json.dumps({"eval_loss": 5.0}) + '\n{"loss": 5.')
    entry = outcome_of(row, FULL, 0, path)
    assert entry.losses == [5.5] and entry.val_loss == 5.0 and entry.peak_bytes == 8
    assert entry.seconds_per_update == 2.0 and entry.tokens_per_s == 1024.0


def test_a_failed_row_keeps_what_it_held_and_why(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"error": "out of memory", "accounts": {"other": 9}}) + "\n")
    entry = outcome_of(Row("plain", "python"), FULL, 0, path)
    assert entry.error == "out of memory" and entry.peak_bytes == 9 and entry.losses == []


def test_a_sample_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"prompt": "a\x1b[2J", "sample": "b\r\x07\tc\n"}) + "\n")
    entry = outcome_of(Row("longer", "cpp"), FULL, 0, path)
    assert entry.prompt == "a\ufffd[2J" and entry.sample == "b\ufffd\ufffd\tc\n"


def test_errors_are_found_on_stderr():
    assert launch.error_in("note\nerror: [memory] over\n") == "[memory] over"
    assert launch.error_in("poise: error: [memory] over\nby 5\n") == "[memory] over by 5"
    assert launch.error_in("Segmentation fault\n") == "Segmentation fault"
    assert launch.error_in("") == ""


def test_a_row_of_two_ranks_gets_its_error_from_the_one_that_failed(tmp_path, monkeypatch):
    """Rank 1 fails at once; rank 0 would wait for it."""
    script = (
        "import os, sys, time\n"
        "assert os.environ['WORLD_SIZE'] == '2' and int(os.environ['MASTER_PORT']) > 0\n"
        "assert int(os.environ['OMP_NUM_THREADS']) >= 1\n"
        "if os.environ['RANK'] == '1': sys.exit('error: [comm] no network')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(launch, "NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(launch, "train_command", lambda: [sys.executable, "-c", script])
    row = Row("2 ranks", "cpp", 4, ranks=2, stage=1)
    entry = launch.run_row(row, QUICK, tmp_path / "c", tmp_path, 0, lambda outcome: None)
    assert "[comm] no network" in entry.error
    assert "--nproc-per-node 2" in entry.command
    assert summary([entry])["rows"][0]["ranks"] == 2


def test_table_says_what_failed():
    misfit = outcome(
        Row("plain", "cpp", budgeted=True), [], budget_bytes=1 << 20, peak_bytes=None,
        accounts={}, error="DefaultCPUAllocator: not enough memory: tried 5 bytes",
    )  # fmt: skip
    text = table.as_text([outcome(), misfit])
    assert "out of memory" in text and "16 x 1" in text
    assert len(table.cells(misfit)) == len(table.HEADINGS)


def test_summary_is_json_even_of_bad_losses():
    text = json.dumps(summary([outcome(losses=[math.nan, 1.0])]), allow_nan=False)
    assert json.loads(text)["rows"][0]["losses"] == [None, 1.0]
    check_summary(json.loads(text))


def test_report_escapes_what_comes_from_outside():
    bad = "<script>alert('x')</script> & \"quotes\""
    entries = [
        outcome(Row(bad, "cpp"), sample=bad, prompt=bad, command=bad),
        outcome(error=bad, losses=[]),
    ]
    text = report.page(entries, Findings([bad], [bad]), {}, {bad: bad}, bad)
    assert "<script" not in text and "&lt;script&gt;" in text and "&amp; &quot;quotes" in text
    check_html(text)


def check_summary(content):
    assert set(content) == {"rows"}
    for row in content["rows"]:
        assert list(row) == list(FIELDS)
        for name, kind in FIELDS.items():
            assert isinstance(row[name], kind), name
        if row["peak_bytes"] is not None:
            assert sum(row["accounts"].values()) == row["peak_bytes"]


class _Balance(html.parser.HTMLParser):
    """Every tag that opens must close."""

    VOID = {"meta", "img", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.images = [], 0

    def handle_starttag(self, tag, attrs):
        self.images += tag == "img"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_html(text):
    parser = _Balance()
    parser.feed(text)
    assert parser.open == []
    return parser


# The whole.


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    entries = [
        outcome(update_seconds=[0.2] * 12),
        outcome(Row("accumulation 4", "python", 4), update_seconds=[0.3] * 12),
    ]
    files = plots.draw_all(entries, tmp_path)
    assert len(files) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files.values())
    assert plots.draw_all([outcome(losses=[], accounts={})], tmp_path) == {}


def fake_run_row(differing):
    """In place of launch.run_row: equal curves, except for the row of that name."""

    def run(row, size, text, out, budget, on_progress):
        losses = [] if row.kind == "misfit" else [5.0 - 0.1 * i for i in range(row.updates(size))]
        states = (4 - row.stage) << 19 if row.offload == "none" else 0
        peak = (40 << 20) // row.accumulation if states else 1 << 18
        accounts = {"activations": peak - states, "optimizer": states}
        entry = outcome(row, losses, peak_bytes=peak, accounts=accounts)
        entry.error = "out of memory: ..." if row.kind == "misfit" else None
        entry.budget_bytes = budget if row.has_budget else 0
        if row.name == differing:
            entry.losses[-1] *= 1.1
        on_progress(entry)
        return entry

    return run


@pytest.mark.parametrize(("differing", "code"), [("none", 0), ("accumulation 4", 1)])
def test_exit_code_says_whether_the_curves_agree(tmp_path, monkeypatch, capsys, differing, code):
    monkeypatch.setattr(launch, "run_row", fake_run_row(differing))
    monkeypatch.setattr(plots, "draw_all", lambda outcomes, folder: {})
    assert demo.main(["--quick", "--out", str(tmp_path)]) == code
    said = capsys.readouterr()
    assert ("The fp32 loss curves agree" in said.out) is (code == 0)
    assert ("accumulation 4 (C++): at update 7 " in said.err) is (code == 1)
    assert (tmp_path / "report.html").exists()  # also when it fails: to see why


def test_rows_that_cannot_start_end_the_demo_with_their_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "train_command", lambda: [sys.executable, "-c", "exit('no way')"])
    rows = [row for row in quick_rows() if row.language == "cpp"]
    monkeypatch.setattr(demo, "quick_rows", lambda: rows)
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "plain big batch (C++): no way" in capsys.readouterr().err


def test_quick_run_from_end_to_end(tmp_path):
    out = tmp_path / "a folder"
    command = [sys.executable, "-m", "poise.demo", "--quick", "--out", str(out)]
    path = os.pathsep.join(p for p in sys.path if p)
    # One thread: on a busy machine two of them wait for each other at every tiny operation.
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The fp32 loss curves agree" in done.stdout and "out of memory" in done.stdout
    content = json.loads((out / "summary.json").read_text())
    check_summary(content)
    by_name = {(row["name"], row["language"]): row for row in content["rows"]}
    assert len(by_name) == len(quick_rows())
    misfit = by_name["plain big batch, budget", "cpp"]
    assert "memory" in misfit["error"] and misfit["losses"] == [] and misfit["budget_bytes"] > 0
    for row in content["rows"]:
        if row is misfit:
            continue
        assert row["error"] is None and row["val_loss"] > 0 and row["tokens_per_s"] > 0
        assert not row["budget_bytes"] or row["peak_bytes"] <= row["budget_bytes"]
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched
    assert check_html(page).images == 3
