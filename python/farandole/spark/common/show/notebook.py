# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Output of a fit in a notebook, in plain HTML: a bar, a line of numbers, the ranks, and a chart
that grows.
"""

# ruff: noqa: PLC0415 - IPython is there where a notebook is

from __future__ import annotations

import contextlib
import html
import time
from typing import TYPE_CHECKING, Any

from farandole.spark.common.show.chart import Chart
from farandole.spark.common.show.progress import Progress, Remaining, scores
from farandole.spark.common.show.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from farandole.spark.common.runs.halting import Stop

_REDRAW_SECONDS = 0.5
_LINES = 20
"""Messages that are shown, the last ones."""
_STEPS = 2000
"""Losses within epochs that are kept."""


class Notebook(Progress):
    """One output of a cell, drawn again as the fit continues."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self._html = HTML
        self._lines: list[str] = []
        self._history: list[dict[str, Any]] = []
        self._now = ""
        self._steps: list[tuple[float, float]] = []
        self._ranks = Ranks(lambda: self._draw(now=False))
        self._drawn = 0.0
        self._left = Remaining()
        self._handle: Any = display(HTML(self._page()), display_id=True)

    def message(self, text: str) -> None:
        """Like `Progress.message`."""
        self._lines.append(text)
        self._draw(now=True)

    def told(self) -> Ranks:
        """Like `Progress.told`."""
        return self._ranks

    @contextlib.contextmanager
    def offering(self, stop: Stop) -> Iterator[Stop]:
        """Like `Progress.offering`. The button is an output of its own, which is not drawn again
        during a click.
        """
        from farandole.spark.common.show.stop_button import button

        with button(stop):
            yield stop

    def step(self, report: dict[str, Any]) -> None:
        """Like `Progress.step`."""
        place = report["epoch"] + report["step"] / max(report["steps"], 1)
        self._left.step(report)
        if self._steps and place <= self._steps[-1][0]:
            # an epoch comes again after a restart
            self._steps = [one for one in self._steps if one[0] < place]
        self._steps.append((place, report["loss"]))
        if len(self._steps) > _STEPS:
            self._steps = self._steps[::2]
        self._now = (
            f"epoch {report['epoch'] + 1}/{report['epochs']}, batch "
            f"{report['step']}/{report['steps']}: loss {report['loss']:.4f}, "
            f"{report['rows_per_second']:,.0f} rows/s"
        )
        self._draw(now=False)

    def epoch(self, report: dict[str, Any]) -> None:
        """Like `Progress.epoch`."""
        entry = report["entry"]
        self._history = [one for one in self._history if one["epoch"] < entry["epoch"]]
        self._history.append(entry)
        self._left.epoch(report)
        self._now = (
            f"epoch {entry['epoch'] + 1}/{report['epochs']}: {scores(entry)}, "
            f"{report['rows_per_second']:,.0f} rows/s"
        )
        self._draw(now=True)

    def _draw(self, *, now: bool) -> None:
        clock = time.monotonic()
        if self._handle is not None and (now or clock - self._drawn >= _REDRAW_SECONDS):
            self._drawn = clock
            self._handle.update(self._html(self._page()))

    def _page(self) -> str:
        bar = (
            '<div style="width:360px;height:8px;background:#ddd">'
            f'<div style="width:{self._left.done:.1%};height:8px;background:#3465a4"></div></div>'
        )
        now = ", ".join(filter(None, (self._now, str(self._left) if self._now else "")))
        text = "<br>".join(html.escape(line) for line in [*self._lines[-_LINES:], now] if line)
        chart = Chart(self._history, steps=self._steps).svg if self._history or self._steps else ""
        return (
            f'<div class="farandole-progress">{bar}<div>{text}</div>{self._ranks.html}{chart}</div>'
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draws the last values."""
        if error is not None:
            self._now = f"ended by {type(error).__name__}"
            self._left.ends()
        self._draw(now=True)
