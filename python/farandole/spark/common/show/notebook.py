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

from farandole.spark.common.show.chart import MetricsChart
from farandole.spark.common.show.progress import ProgressDisplay, format_scores
from farandole.spark.common.show.rank_table import RankTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.common.runs.stop_request import StopRequest

_REDRAW_INTERVAL_SECONDS = 0.5
_MAX_SHOWN_MESSAGES = 20
"""Messages that are shown, the last ones."""
_MAX_STEP_LOSSES = 2000
"""Losses within epochs that are kept."""


class NotebookDisplay(ProgressDisplay):
    """One output of a cell, drawn again as the fit continues."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self._html = HTML
        self._lines: list[str] = []
        self._history: list[dict[str, Any]] = []
        self._status_text = ""
        self._steps: list[tuple[float, float]] = []
        self._ranks = RankTable(lambda: self._draw_page(now=False))
        self._last_draw_time = 0.0
        self._handle: Any = display(HTML(self._render_page()), display_id=True)

    def show_message(self, text: str) -> None:
        """Like `ProgressDisplay.show_message`."""
        self._lines.append(text)
        self._draw_page(now=True)

    def rank_reporter(self) -> RankTable:
        """Like `ProgressDisplay.rank_reporter`."""
        return self._ranks

    @contextlib.contextmanager
    def offer_stop(self, stop: StopRequest) -> Iterator[StopRequest]:
        """Like `ProgressDisplay.offer_stop`. The button is a separate output, so that a refresh of
        the page does not redraw it during a click.
        """
        from farandole.spark.common.show.stop_button import show_stop_button

        with show_stop_button(stop):
            yield stop

    def show_step(self, report: dict[str, Any]) -> None:
        """Like `ProgressDisplay.show_step`."""
        position = report["epoch"] + report["step"] / max(report["steps"], 1)
        if self._steps and position <= self._steps[-1][0]:
            # an epoch comes again after a restart
            self._steps = [one for one in self._steps if one[0] < position]
        self._steps.append((position, report["loss"]))
        if len(self._steps) > _MAX_STEP_LOSSES:
            self._steps = self._steps[::2]
        self._status_text = (
            f"epoch {report['epoch'] + 1}/{report['epochs']}, batch "
            f"{report['step']}/{report['steps']}: loss {report['loss']:.4f}, "
            f"{report['rows_per_second']:,.0f} rows/s"
        )
        self._draw_page(now=False)

    def show_epoch(self, report: dict[str, Any]) -> None:
        """Like `ProgressDisplay.show_epoch`."""
        entry = report["entry"]
        self._history = [one for one in self._history if one["epoch"] < entry["epoch"]]
        self._history.append(entry)
        self._status_text = (
            f"epoch {entry['epoch'] + 1}/{report['epochs']}: {format_scores(entry)}, "
            f"{report['rows_per_second']:,.0f} rows/s"
        )
        self._draw_page(now=True)

    def _draw_page(self, *, now: bool) -> None:
        clock = time.monotonic()
        if self._handle is not None and (
            now or clock - self._last_draw_time >= _REDRAW_INTERVAL_SECONDS
        ):
            self._last_draw_time = clock
            self._handle.update(self._html(self._render_page()))

    def _render_page(self) -> str:
        bar = (
            '<div style="width:360px;height:8px;background:#ddd">'
            f"<div "
            f'style="width:{self.remaining_time.done:.1%};height:8px;background:#3465a4"></div></div>'
        )
        now = ", ".join(
            filter(None, (self._status_text, str(self.remaining_time) if self._status_text else ""))
        )
        text = "<br>".join(
            html.escape(line) for line in [*self._lines[-_MAX_SHOWN_MESSAGES:], now] if line
        )
        chart = (
            MetricsChart(self._history, steps=self._steps).svg
            if self._history or self._steps
            else ""
        )
        table = self._ranks.table_html
        return f'<div class="farandole-progress">{bar}<div>{text}</div>{table}{chart}</div>'

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None:
        """Draws the last values."""
        if kind is not None:
            self._status_text = f"ended by {kind.__name__}"
            self.remaining_time.mark_ended()
        self._draw_page(now=True)
