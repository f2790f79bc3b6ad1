# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Output of a fit in a notebook: a bar, a line of numbers and a chart that grows with every epoch, in plain HTML."""

# ruff: noqa: PLC0415 - IPython is there where a notebook is

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING, Any

from farandole.spark.common.chart import Chart
from farandole.spark.common.progress import Progress, scores

if TYPE_CHECKING:
    from types import TracebackType

_REDRAW_SECONDS = 0.5


class Notebook(Progress):
    """One output of a cell, drawn again as the fit continues."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self._html = HTML
        self._lines: list[str] = []
        self._history: list[dict[str, Any]] = []
        self._now = ""
        self._done, self._drawn = 0.0, 0.0
        self._handle: Any = display(HTML(self._page()), display_id=True)

    def message(self, text: str) -> None:
        """As `Progress.message`."""
        self._lines.append(text)
        self._draw(now=True)

    def step(self, report: dict[str, Any]) -> None:
        """As `Progress.step`."""
        self._done = (report["epoch"] + report["step"] / max(report["steps"], 1)) / report["epochs"]
        self._now = (
            f"epoch {report['epoch'] + 1}/{report['epochs']}, batch {report['step']}/{report['steps']}: "
            f"loss {report['loss']:.4f}, {report['rows_per_second']:,.0f} rows/s"
        )
        self._draw(now=False)

    def epoch(self, report: dict[str, Any]) -> None:
        """As `Progress.epoch`."""
        entry = report["entry"]
        self._history.append(entry)
        self._done = (entry["epoch"] + 1) / report["epochs"]
        self._now = (
            f"epoch {entry['epoch'] + 1}/{report['epochs']}: {scores(entry)}, {report['rows_per_second']:,.0f} rows/s"
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
            f'<div style="width:{self._done:.1%};height:8px;background:#3465a4"></div></div>'
        )
        text = "<br>".join(html.escape(line) for line in [*self._lines, self._now] if line)
        chart = Chart(self._history).svg if self._history else ""
        return f'<div class="farandole-progress">{bar}<div>{text}</div>{chart}</div>'

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Draws what came last."""
        if error is not None:
            self._now = f"ended by {type(error).__name__}"
        self._draw(now=True)
