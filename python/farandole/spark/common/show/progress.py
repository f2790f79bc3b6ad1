# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Progress of a fit in the driver: a bar in a terminal, a live chart in a notebook, a line per
epoch elsewhere.

With `verbose=0` it shows nothing.

Workers send two kinds of reports: `{"kind": "step", ...}` a few times per second and `{"kind":
"epoch", ...}` with an entry of the history. `farandole.runner.report_validation` has checked them.
`{"kind": "message", "text": ...}` is a sentence for the user.
A report of a user's own function may lack what estimators add; it is not shown.
"""

# ruff: noqa: PLC0415 - rich is loaded where there is a terminal

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from farandole.runner.show.history import entry_scores

if TYPE_CHECKING:
    from farandole.runner.show.run_reporter import RunReportReceiver
    from farandole.spark.common.runs.stop_request import StopRequest

_LINE_INTERVAL_SECONDS = 10.0
_MIN_SPEED_SECONDS = 1.0
"""Before that, the speed of a fit is not known."""
_REPORT_KINDS = ("step", "epoch")
_REQUIRED_REPORT_VALUES = ("epochs", "steps", "rows_per_second")
"""Values that estimators add to a report."""


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """A display of a run that shows nothing; the base class of all displays."""

    @cached_property
    def remaining_time(self) -> RemainingTime:
        """The time that the fit still needs, by its reports."""
        return RemainingTime()

    def show_message(self, text: str) -> None:
        """Says one sentence about the fit."""

    def show_report(self, report: dict[str, Any]) -> None:
        """Shows a report of a worker.

        Args:
            report: Checked by `farandole.runner.report_validation`.
        """
        kind = report.get("kind")
        if kind == "message" and isinstance(report.get("text"), str):
            self.show_message(report["text"])
        if kind not in _REPORT_KINDS or any(
            report.get(name) is None for name in _REQUIRED_REPORT_VALUES
        ):
            return
        self.remaining_time.note_report(report)
        if kind == "step":
            self.show_step(report)
        else:
            self.show_epoch(report)

    def show_step(self, report: dict[str, Any]) -> None:
        """Shows progress within an epoch."""

    def show_epoch(self, report: dict[str, Any]) -> None:
        """Shows a complete epoch."""

    def rank_reporter(self) -> RunReportReceiver | None:
        """Returns the receiver of the state of the ranks; `None` if nothing shows the state."""

    def offer_stop(self, stop: StopRequest) -> AbstractContextManager[StopRequest | None]:
        """Offers a button that stops the fit inside the context; yields `None` if there is no
        button.

        Args:
            stop: Stops the fit.
        """
        del stop
        return nullcontext()

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None:
        """Leaves the terminal as it was."""


class RemainingTime:
    """The time that a fit still needs at its present speed.

    Steps before the first report do not count, because a run may continue from a checkpoint.
    """

    def __init__(self) -> None:
        self.done = 0.0
        self._measured_from: tuple[float, float] | None = None

    def note_report(self, report: dict[str, Any]) -> None:
        """Takes note of a report about a step or an epoch.

        Args:
            report: report that a display shows.
        """
        if report["kind"] == "step":
            epochs = report["epoch"] + report["step"] / max(report["steps"], 1)
        else:
            epochs = report["entry"]["epoch"] + 1
        self.done = done = epochs / report["epochs"]
        if self._measured_from is None or done < self._measured_from[1]:
            self._measured_from = time.monotonic(), done

    def mark_ended(self) -> None:
        """Notes that the fit has ended."""
        self._measured_from = None

    def __str__(self) -> str:
        """Returns a text such as `about 5 min left`; empty if the time is not known."""
        if self._measured_from is None or not self._measured_from[1] < self.done < 1:
            return ""
        began, before = self._measured_from
        took = time.monotonic() - began
        if took < _MIN_SPEED_SECONDS:
            return ""
        return f"about {_format_duration(took * (1 - self.done) / (self.done - before))} left"


class ProgressLines(ProgressDisplay):
    """A line per epoch, and one every ten seconds within long epochs.

    Args:
        stream: output stream; default: standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last_line_time: float | None = None

    def show_message(self, text: str) -> None:
        """Like `ProgressDisplay.show_message`."""
        print(text, file=self._stream, flush=True)

    def show_step(self, report: dict[str, Any]) -> None:
        """Like `ProgressDisplay.show_step`."""
        now = time.monotonic()
        self._last_line_time = now if self._last_line_time is None else self._last_line_time
        if now - self._last_line_time >= _LINE_INTERVAL_SECONDS:
            self._last_line_time = now
            prefix = (
                f"epoch {report['epoch'] + 1}/{report['epochs']}  batch "
                f"{report['step']}/{report['steps']}"
            )
            self._print_line(f"{prefix}  loss {report['loss']:.4f}", report)

    def show_epoch(self, report: dict[str, Any]) -> None:
        """Like `ProgressDisplay.show_epoch`."""
        self._last_line_time = time.monotonic()
        prefix = f"epoch {report['entry']['epoch'] + 1}/{report['epochs']}"
        self._print_line(f"{prefix}  {format_scores(report['entry'])}", report)

    def _print_line(self, text: str, report: dict[str, Any]) -> None:
        remaining = str(self.remaining_time)
        self.show_message(
            f"{text}  {report['rows_per_second']:,.0f} rows/s"
            + (f"  {remaining}" if remaining else "")
        )


class ProgressBar(ProgressDisplay):
    """A live bar: epoch, batch, rows per second, loss, scores of the last validation, and the time
    left.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Rich

        self._rich = Rich(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn(
                "{task.fields[speed]} rows/s  loss {task.fields[loss]}  {task.fields[validation]}"
            ),
            TimeElapsedColumn(),
            # rich's own column does not know where a run went on from
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
        )
        self._rich.start()  # at once, so that later output is printed above the bar
        self._task: Any = None
        self._validation = ""

    def show_message(self, text: str) -> None:
        """Like `ProgressDisplay.show_message`."""
        self._rich.console.print(text, markup=False, highlight=False)

    def show_step(self, report: dict[str, Any]) -> None:
        """Like `ProgressDisplay.show_step`."""
        self._update_bar(report["epoch"], report["epochs"], report["step"], report["steps"], report)

    def show_epoch(self, report: dict[str, Any]) -> None:
        """Like `ProgressDisplay.show_epoch`."""
        row = entry_scores(report["entry"])
        found = {name: value for name, value in row.items() if name.startswith("val_")}
        self._validation = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        loss = {"loss": row.get("loss", float("nan")), "rows_per_second": report["rows_per_second"]}
        self._update_bar(
            report["entry"]["epoch"], report["epochs"], report["steps"], report["steps"], loss
        )

    def _update_bar(
        self, epoch: int, epochs: int, step: int, steps: int, numbers: dict[str, Any]
    ) -> None:
        fields: dict[str, Any] = {
            "epoch": f"{epoch + 1}/{epochs}",
            "speed": f"{numbers['rows_per_second']:,.0f}",
            "loss": f"{numbers['loss']:.4f}",
            "validation": self._validation,
            "left": str(self.remaining_time),
        }
        if self._task is None:
            self._task = self._rich.add_task("training", total=steps * epochs, **fields)
        self._rich.update(self._task, completed=epoch * steps + step, **fields)

    def __exit__(self, *_: object) -> None:
        """Ends the live display."""
        self._rich.stop()


def create_progress_display(verbose: int) -> ProgressDisplay:
    """Returns the right way to show a fit here.

    Args:
        verbose: the estimator's parameter.

    Returns:
        A context manager; reports are for its inside.
    """
    if verbose <= 0:
        return ProgressDisplay()
    from farandole.common.notebook import in_notebook
    from farandole.spark.common.show.notebook import NotebookDisplay

    if in_notebook():
        return NotebookDisplay()
    if not sys.stderr.isatty():
        return ProgressLines()
    try:
        return ProgressBar()
    except ImportError:
        return ProgressLines()


def format_scores(entry: dict[str, Any]) -> str:
    """Loss and metrics of an epoch, in one line.

    Args:
        entry: entry of the history.
    """
    return "  ".join(f"{name} {value:.4f}" for name, value in entry_scores(entry).items())


def _format_duration(seconds: float) -> str:
    """Returns a time in the unit that a reader would choose."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
