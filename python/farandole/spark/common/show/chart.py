# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A chart of a history: lines over epochs, in SVG, which notebooks show without any library."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.runner.show.history import entry_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.runner.show.history import Entry

_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 34
_LINE_COLORS = ("#3465a4", "#cc0000")
_STEP_LINE_COLOR = "#b8c7dc"
_MAX_LINE_POINTS = 400
"""Points of a line at most: the picture stays small, however long the run is."""


class MetricsChart:
    """Panels of lines, one for the loss and one for each metric; training and validation share a
    panel.

    Notebooks show it by itself; `save` writes it.

    Args:
        history: one entry per epoch.
        names: names of the numbers to show; default: all.
        steps: losses within epochs, each with its place in epochs from the start of the run.
    """

    def __init__(
        self,
        history: Sequence[Entry],
        names: Sequence[str] | None = None,
        steps: Sequence[tuple[float, float]] = (),
    ) -> None:
        rows = [(entry["epoch"] + 1, entry_scores(entry)) for entry in thin_rows(history)]
        self._steps = [
            (position, loss) for position, loss in thin_rows(steps) if math.isfinite(loss)
        ]
        found = dict.fromkeys(name.removeprefix("val_") for _, row in rows for name in row)
        chosen = [name for name in found if names is None or name in names]
        self._panels = [
            (name, [(epoch, row.get(name), row.get(f"val_{name}")) for epoch, row in rows])
            for name in chosen
        ]
        if self._steps and not self._panels:
            self._panels = [("loss", [])]

    @property
    def svg(self) -> str:
        """The picture."""
        panels = [
            _render_panel(name, points, index * _WIDTH, self._steps if name == "loss" else [])
            for index, (name, points) in enumerate(self._panels)
        ]
        width = _WIDTH * max(1, len(panels))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
            f'font-family="sans-serif" font-size="11">{"".join(panels)}</svg>'
        )

    def save(self, path: str) -> None:
        """Writes the picture.

        Args:
            path: path of a local file, such as `history.svg`.
        """
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg


def thin_rows(rows: Sequence[Any], max_rows: int = _MAX_LINE_POINTS) -> list[Any]:
    """Returns at most the given number of rows, evenly spaced, including the last row.

    Args:
        rows: any.
        max_rows: at least one.
    """
    stride = -(-len(rows) // max_rows) or 1
    return list(rows[::-1][::stride][::-1])


def _render_panel(
    name: str,
    points: Sequence[tuple[float, Any, Any]],
    offset: float,
    steps: Sequence[tuple[float, float]] = (),
) -> str:
    values = [
        value for _, *pair in points for value in pair if value is not None and math.isfinite(value)
    ]
    values += [loss for _, loss in steps]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high == low:
        low, high = low - 0.5, high + 0.5
    places = [*(point[0] for point in points), *(svg_point for svg_point, _ in steps)]
    first, end = min(places), max(places)
    last = max(end, first + 1)

    def svg_point(epoch: float, value: float) -> str:
        x = offset + _LEFT + (epoch - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    lines = (
        [_render_line([svg_point(*point) for point in steps], _STEP_LINE_COLOR)] if steps else []
    )
    lines += [
        _render_line(
            [
                svg_point(point[0], point[which])
                for point in points
                if point[which] is not None and math.isfinite(point[which])
            ],
            color,
        )
        for which, color in enumerate(_LINE_COLORS, start=1)
    ]
    bottom, right = _HEIGHT - _BOTTOM, offset + _WIDTH - _RIGHT
    axis = f'<path d="M{offset + _LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
    labels = [
        _render_text(offset + _LEFT - 4, _TOP + 4, f"{high:.4g}", "end"),
        _render_text(offset + _LEFT - 4, bottom, f"{low:.4g}", "end"),
        _render_text(
            offset + _LEFT,
            bottom + 14,
            f"epoch {first:g}" if first == int(first) else f"epoch {first:.2f}",
            "start",
        ),
        _render_text(right, bottom + 14, f"{end:g}" if end == int(end) else f"{end:.2f}", "end"),
        _render_text(offset + _LEFT, 16, name, "start", weight="bold"),
    ]
    if any(point[2] is not None for point in points):
        labels += [
            _render_text(right - 70, 16, "training", "end", color=_LINE_COLORS[0]),
            _render_text(right, 16, "validation", "end", color=_LINE_COLORS[1]),
        ]
    return axis + "".join(lines) + "".join(labels)


def _render_line(points: list[str], color: str) -> str:
    if len(points) == 1:
        x, _, y = points[0].partition(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'
    return (
        f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        if points
        else ""
    )


def _render_text(
    x: float, y: float, text: str, anchor: str, *, weight: str = "normal", color: str = "#333"
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{color}">{html.escape(text)}</text>'
    )
