"""What `poise train` shows and writes of a model of Python: the lines of src/cli/report.cpp.

A test trains one model by both commands and compares text and metrics.jsonl line by line.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from poise import trainer_balance
from poise._C import Error, StepResult, format_bytes
from poise.balance import Balance
from poise.metrics_log import MetricsLog

logger = logging.getLogger("poise")
CLEAR_TO_END = "\x1b[K"
_KEPT = {  # in a save -> attribute; sums go on to the bit
    "updates": "updates",
    "tokens": "_tokens",
    "logged_updates": "_logged_updates",
    "logged_loss": "_logged_loss",
    "logged_tokens": "_logged_tokens",
    "skipped": "_skipped",
    "peak_bytes": "_peak_bytes",
    "accounts": "_accounts",
    "losses": "_losses",
}


class RunReport:
    """Lines for people on standard output (JSON lines with `as_json`), and metrics.jsonl.

    Args:
      settings: every section with every key.
      accumulation: micro-batches of one update.
      as_json: the lines of metrics.jsonl instead of text.
    """

    def __init__(self, settings: dict[str, Any], accumulation: int, as_json: bool) -> None:
        self._settings, self._accumulation, self._as_json = settings, accumulation, as_json
        path = Path(settings["train"]["output_dir"]) / "metrics.jsonl"
        try:
            fresh = settings["state"]["resume"] == "none"
            self._metrics = MetricsLog(path, fresh=fresh, echo=sys.stdout if as_json else None)
        except OSError as error:
            raise Error(
                f"[cli] cannot write {path}: {error.strerror}; choose another train.output_dir"
            ) from None
        self._terminal = not as_json and sys.stdout.isatty()
        self._live = False  # a line without its end is on the screen
        self._log_lines = _LogLines(self)
        self._level = logger.level

        self.updates = 0
        self._losses: list[float] = []
        self._tokens = self._steady_tokens = self._steady_seconds = 0.0
        self._logged_loss = self._logged_tokens = self._logged_seconds = 0.0
        self._logged_updates = 0  # since the last line of the log
        self._peak_bytes, self._accounts = 0, {}
        self._host_bytes = self._file_bytes = 0  # offloaded
        self._skipped = 0
        self._validation_loss: float | None = None

    def __enter__(self) -> RunReport:
        # Lines of the log would be written into the live line.
        logger.addHandler(self._log_lines)
        if self._level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc: object) -> None:
        logger.removeHandler(self._log_lines)
        logger.setLevel(self._level)
        if self._live:
            print(flush=True)
        self._metrics.close()

    def balanced(self, accumulation: int) -> None:
        """Tells what the planner found; the micro-batch stands in the settings."""
        self._accumulation = accumulation

    def note(self, text: str) -> None:
        """One line of text; a live line ends first."""
        if self._as_json:
            return
        if self._live:
            print()
        self._live = False
        print(text, flush=True)

    def log_line(self, text: str) -> None:
        if self._as_json:
            print(text, file=sys.stderr, flush=True)
        else:
            self.note(text)

    def update(self, result: StepResult, seconds: float) -> None:
        """One update; `seconds` of data and step."""
        self._count(result, seconds)
        train = self._settings["train"]
        due = (
            self.updates in (1, train["max_updates"])
            or self.updates % train["log_every"] == 0
            or not result.applied
        )
        if due or self._terminal:
            self._show(result, seconds)
        if due:
            self._write_update(result)

    def compared(self, found: Balance, result: StepResult) -> None:
        """What was planned and what it took, after the first update."""
        for line in trainer_balance.compared(found, result):
            self.note(line)
        if plan := trainer_balance.metrics(found, result):
            self._metrics.write({"step": self.updates, "plan": plan})

    def validation(self, loss: float) -> None:
        self._validation_loss = loss
        self.note(f"  validation after update {self.updates}: loss {loss:.4f}")
        self._metrics.write({"step": self.updates, "eval_loss": loss})

    def finish(self, error: str | None = None, held: dict[str, Any] | None = None) -> None:
        """The last line of metrics.jsonl and of the text.

        Args:
          error: why the run did not come to its end.
          held: Engine.memory() of a run that failed.
        """
        if held and held["peak_bytes"] > self._peak_bytes:
            self._peak_bytes, self._accounts = held["peak_bytes"], held["at_peak"]
        self._metrics.write(self._summary(error))
        if error is None:
            peak = format_bytes(self._peak_bytes)
            rate = self._tokens_per_second()
            self.note(f"done: {self.updates} updates, {rate:.0f} tokens/s, peak {peak}")

    def text(self) -> str:
        """What a save keeps of the report."""
        return json.dumps(
            {name: getattr(self, attribute) for name, attribute in _KEPT.items()}
            | {"lines": self._metrics.lines}
        )

    def go_on(self, text: str) -> None:
        """The report of a resumed run goes on from what a save kept."""
        try:
            kept = json.loads(text)
            for name, attribute in _KEPT.items():
                setattr(self, attribute, kept[name])
            self._metrics.go_on_after(kept["lines"])
        except (ValueError, KeyError, TypeError) as error:
            raise Error(
                f"[cli] the save does not say where its run was: {error}; resume from a save of "
                "`poise train`"
            ) from None

    def begin_anew(self) -> None:
        self._metrics.go_on_after(0)

    def _count(self, result: StepResult, seconds: float) -> None:
        self.updates += 1
        self._losses.append(result.loss)
        self._tokens += result.tokens
        if self.updates > 1:
            self._steady_tokens += result.tokens
            self._steady_seconds += seconds
        self._logged_updates += 1
        self._logged_loss += result.loss
        self._logged_tokens += result.tokens
        self._logged_seconds += seconds
        self._skipped = result.skipped
        self._host_bytes, self._file_bytes = result.host_bytes, result.file_bytes
        if result.peak_bytes > self._peak_bytes:
            self._peak_bytes, self._accounts = result.peak_bytes, result.accounts

    def _show(self, result: StepResult, seconds: float) -> None:
        text = (
            f"update {self.updates}/{self._settings['train']['max_updates']}  "
            f"loss {result.loss:.4f}  lr {result.lr:.3g}  norm {result.grad_norm:.3f}  "
            f"{result.tokens / max(seconds, 1e-9):.0f} tokens/s  {format_bytes(result.peak_bytes)}"
        )
        if not result.applied:
            bad = result.first_bad_parameter
            self.note(f"{text}  {result.status}" + (f" in {bad}" if bad else ""))
        elif self._terminal:
            print(f"\r{text}{CLEAR_TO_END}", end="", flush=True)
            self._live = True
        else:
            self.note(text)

    def _write_update(self, result: StepResult) -> None:
        line = {
            "step": self.updates,
            "loss": self._logged_loss / self._logged_updates,
            "grad_norm": result.grad_norm,
            "learning_rate": result.lr,
            "tokens_per_second": self._logged_tokens / max(self._logged_seconds, 1e-9),
            "tokens": self._tokens,
            "peak_bytes": self._peak_bytes,
            "accounts": result.accounts,
            "host_bytes": self._host_bytes,
            "file_bytes": self._file_bytes,
            "status": str(result.status),
            "skipped": result.skipped,
        }
        if self._settings["engine"]["noise_scale"]:
            line["noise_scale"] = result.noise_scale
        if self._settings["precision"]["dtype"] == "fp16":
            line["loss_scale"] = result.loss_scale
        if result.first_bad_parameter:
            line["first_bad_parameter"] = result.first_bad_parameter
        self._metrics.write(line)
        self._logged_loss = self._logged_tokens = self._logged_seconds = 0.0
        self._logged_updates = 0

    def _tokens_per_second(self) -> float:
        """Over the run, the first update left out."""
        return self._steady_tokens / self._steady_seconds if self._steady_seconds > 0 else 0.0

    def _summary(self, error: str | None) -> dict[str, Any]:
        settings = self._settings
        return {
            "summary": True,
            "language": "python",
            "ranks": 1,
            "stage": 0,
            "precision": settings["precision"]["dtype"],
            "micro_batch": settings["batch"]["micro_batch_size"],
            "accumulation": self._accumulation,
            "checkpointing": settings["checkpointing"]["policy"],
            "budget_bytes": settings["memory"]["budget_bytes"],
            "updates": self.updates,
            "skipped": self._skipped,
            "tokens": self._tokens,
            "tokens_per_s": self._tokens_per_second(),
            "peak_bytes": self._peak_bytes,
            "accounts": self._accounts,
            "host_bytes": self._host_bytes,
            "file_bytes": self._file_bytes,
            "losses": self._losses,
            "val_loss": self._validation_loss,
            "error": error,
        }


class _LogLines(logging.Handler):
    """Takes lines of the log to the report."""

    def __init__(self, report: RunReport) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.log_line(record.getMessage())
