# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Progress of a fit in the driver: a bar in a terminal, a live chart in a notebook, a line per
epoch elsewhere.

With `verbose=0` it shows nothing.

Workers send two kinds of reports: `{"kind": "step", ...}` a few times per second and `{"kind":
"epoch", ...}` with an entry of the history. `farandole.runner.reports` has checked them. A report
of a user's own function may lack what estimators add; it is not shown.
"""

# ruff: noqa: PLC0415 - rich is loaded where there is a terminal

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

from farandole.runner.show.history import flat

if TYPE_CHECKING:
    from types import TracebackType

    from farandole.runner.show.told import Told
    from farandole.spark.common.runs.halting import Stop

_QUIET_SECONDS = 10.0
_HIDDEN = ("epoch", "seconds", "rows")
_SURE_SECONDS = 1.0
"""Before that, the speed of a fit is not known."""
_SHOWN = {
    "step": ("epochs", "steps", "rows_per_second"),
    "epoch": ("epochs", "steps", "rows_per_second"),
}
"""Values that estimators add to a report, by its kind."""


class Progress(AbstractContextManager["Progress"]):
    """Shows a run and says nothing; what shows something derives from it."""

    def message(self, text: str) -> None:
        """Says one sentence about the fit."""

    def report(self, report: dict[str, Any]) -> None:
        """Takes what a worker has sent.

        Args:
            report: Checked by `farandole.runner.reports`.
        """
        kind = report.get("kind")
        if kind not in _SHOWN or any(report.get(name) is None for name in _SHOWN[kind]):
            return
        if kind == "step":
            self.step(report)
        else:
            self.epoch(report)

    def step(self, report: dict[str, Any]) -> None:
        """Some batches of an epoch are done."""

    def epoch(self, report: dict[str, Any]) -> None:
        """An epoch is done."""

    def told(self) -> Told | None:
        """The receiver of the state of the ranks; `None` if nothing shows it."""

    def offering(self, stop: Stop) -> AbstractContextManager[Stop | None]:
        """Offers a button that stops the fit while it runs inside; yields `None` where there is
        none.

        Args:
            stop: Stops the fit.
        """
        del stop
        return nullcontext()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the terminal as it was."""


class Remaining:
    """The time that a fit still needs at its present speed.

    Steps before the first report do not count, because a run may continue from a checkpoint.
    """

    def __init__(self) -> None:
        self.done = 0.0
        self._begun: tuple[float, float] | None = None

    def step(self, report: dict[str, Any]) -> None:
        """Takes note of a report about a step.

        Args:
            report: of the kind `step`.
        """
        self._reaches(
            (report["epoch"] + report["step"] / max(report["steps"], 1)) / report["epochs"]
        )

    def epoch(self, report: dict[str, Any]) -> None:
        """Takes note of a report about an epoch.

        Args:
            report: of the kind `epoch`.
        """
        self._reaches((report["entry"]["epoch"] + 1) / report["epochs"])

    def _reaches(self, done: float) -> None:
        self.done = done
        if self._begun is None or done < self._begun[1]:
            self._begun = time.monotonic(), done

    def ends(self) -> None:
        """The fit has ended."""
        self._begun = None

    def __str__(self) -> str:
        """Returns a text such as `about 5 min left`; empty if the time is not known."""
        if self._begun is None or not self._begun[1] < self.done < 1:
            return ""
        began, before = self._begun
        took = time.monotonic() - began
        if took < _SURE_SECONDS:
            return ""
        return f"about {_told(took * (1 - self.done) / (self.done - before))} left"


class Lines(Progress):
    """A line per epoch, and one every ten seconds within long epochs.

    Args:
        stream: where to; standard error when omitted.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._left = Remaining()
        self._spoken: float | None = None

    def message(self, text: str) -> None:
        """Like `Progress.message`."""
        print(text, file=self._stream, flush=True)

    def step(self, report: dict[str, Any]) -> None:
        """Like `Progress.step`."""
        self._left.step(report)
        now = time.monotonic()
        self._spoken = now if self._spoken is None else self._spoken
        if now - self._spoken >= _QUIET_SECONDS:
            self._spoken = now
            place = (
                f"epoch {report['epoch'] + 1}/{report['epochs']}  batch "
                f"{report['step']}/{report['steps']}"
            )
            self._line(f"{place}  loss {report['loss']:.4f}", report)

    def epoch(self, report: dict[str, Any]) -> None:
        """Like `Progress.epoch`."""
        self._left.epoch(report)
        self._spoken = time.monotonic()
        place = f"epoch {report['entry']['epoch'] + 1}/{report['epochs']}"
        self._line(f"{place}  {scores(report['entry'])}", report)

    def _line(self, text: str, report: dict[str, Any]) -> None:
        left = str(self._left)
        self.message(
            f"{text}  {report['rows_per_second']:,.0f} rows/s" + (f"  {left}" if left else "")
        )


class Bar(Progress):
    """A live bar: epoch, batch, rows per second, loss, what the last validation gave, and the
    time left.
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
        self._rich.start()  # at once: what is printed from now on goes above the bar
        self._task: Any = None
        self._validation = ""
        self._left = Remaining()

    def message(self, text: str) -> None:
        """Like `Progress.message`."""
        self._rich.console.print(text, markup=False, highlight=False)

    def step(self, report: dict[str, Any]) -> None:
        """Like `Progress.step`."""
        self._left.step(report)
        self._show(report["epoch"], report["epochs"], report["step"], report["steps"], report)

    def epoch(self, report: dict[str, Any]) -> None:
        """Like `Progress.epoch`."""
        self._left.epoch(report)
        row = flat(report["entry"])
        found = {name: value for name, value in row.items() if name.startswith("val_")}
        self._validation = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        loss = {"loss": row.get("loss", float("nan")), "rows_per_second": report["rows_per_second"]}
        self._show(
            report["entry"]["epoch"], report["epochs"], report["steps"], report["steps"], loss
        )

    def _show(
        self, epoch: int, epochs: int, step: int, steps: int, numbers: dict[str, Any]
    ) -> None:
        fields: dict[str, Any] = {
            "epoch": f"{epoch + 1}/{epochs}",
            "speed": f"{numbers['rows_per_second']:,.0f}",
            "loss": f"{numbers['loss']:.4f}",
            "validation": self._validation,
            "left": str(self._left),
        }
        if self._task is None:
            self._task = self._rich.add_task("training", total=steps * epochs, **fields)
        self._rich.update(self._task, completed=epoch * steps + step, **fields)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the live display."""
        self._rich.stop()


def progress(verbose: int) -> Progress:
    """Returns the right way to show a fit here.

    Args:
        verbose: the estimator's parameter.

    Returns:
        A context manager; reports are for its inside.
    """
    if verbose <= 0:
        return Progress()
    from farandole.common.notebook import in_notebook
    from farandole.spark.common.show.notebook import Notebook

    if in_notebook():
        return Notebook()
    if not sys.stderr.isatty():
        return Lines()
    try:
        return Bar()
    except ImportError:
        return Lines()


def scores(entry: dict[str, Any]) -> str:
    """Loss and metrics of an epoch, in one line.

    Args:
        entry: of the history.
    """
    return "  ".join(
        f"{name} {value:.4f}" for name, value in flat(entry).items() if name not in _HIDDEN
    )


def _told(seconds: float) -> str:
    """Returns a time in the unit that a reader would choose."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
