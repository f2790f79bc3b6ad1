# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The ranks of a fit in a notebook: where each runs, its state, and where the time of its steps
goes.

At most a few ranks are listed, those first that need attention. A line counts the others.
"""

from __future__ import annotations

import html
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from farandole.runner.show.told import Told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST: Final = 8
"""Ranks that are listed."""

_SLOW: Final = 1.3
"""By how much longer than that of the median a straggler's own work takes."""
_ORDER: Final = ("failed", "lost", "slow", "starting", "training", "ended")
"""States, those first that need attention."""
_COLORS: Final = {"failed": "#cc0000", "lost": "#cc0000", "slow": "#c06000"}
_LONGEST: Final = 64
_CELL: Final = "padding:1px 10px 1px 0;text-align:left"


class Ranks(Told):
    """Receives the ranks of a run.

    Args:
        changed: Is called after each change.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._ranks: list[dict[str, Any]] = []

    def put(self, run: str, key: str, body: Mapping[str, Any], *, logged: bool = True) -> None:
        """Like `Told.put`."""
        del run, logged
        if key == "ranks":
            self._ranks = list(body["ranks"])
            self._changed()

    @property
    def html(self) -> str:
        """The table; empty before the ranks have places."""
        return table(self._ranks)


def table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of some ranks, in HTML.

    Args:
        ranks: As `Training` tells them.
    """
    if not ranks:
        return ""
    usual = _median([own for one in ranks if (own := _own(one)) is not None])
    found = [(state(one, usual), one) for one in ranks]
    found.sort(key=lambda pair: (_ORDER.index(pair[0]), pair[1]["rank"]))
    listed, others = (
        sorted(found[:MOST], key=lambda pair: pair[1]["rank"]),
        Counter(told for told, _ in found[MOST:]),
    )
    with_gpu = any(one.get("gpu") is not None for one in ranks)
    heads = [
        "rank",
        "state",
        "host",
        "process",
        *(["GPU"] if with_gpu else []),
        "step",
        "waits for data",
        "reduces",
    ]
    lines = [_line("th", heads)]
    for told, one in listed:
        gpu = [one.get("gpu")] if with_gpu else []
        step = one.get("step_seconds")
        shares = [_share(one.get(name), step) for name in ("data_seconds", "reduce_seconds")]
        lines.append(
            _line(
                "td",
                [one["rank"], told, one.get("host"), one.get("pid"), *gpu, _time(step), *shares],
            )
        )
    counts = ", ".join(f"{others[name]} {name}" for name in _ORDER if others[name])
    more = f"<div>{sum(others.values())} more ranks: {counts}</div>" if others else ""
    return (
        '<table class="farandole-ranks" '
        f'style="border-collapse:collapse">{"".join(lines)}</table>{more}'
    )


def state(rank: Mapping[str, Any], usual: float | None) -> str:
    """Returns the state of a rank in a word.

    Args:
        rank: As `Training` tells it.
        usual: The median of what ranks compute in a step, in seconds; `None` where fewer than two
            measure it.
    """
    told = rank.get("state")
    if told in _ORDER:
        return str(told)
    if not _is_number(rank.get("step_seconds")):
        return "starting"
    own = _own(rank)
    return "slow" if usual is not None and own is not None and own > _SLOW * usual else "training"


def _own(rank: Mapping[str, Any]) -> float | None:
    """Returns the seconds of a step without its wait for the others; `None` if the rank does not
    measure it.
    """
    step: Any = rank.get("step_seconds")
    reduce: Any = rank.get("reduce_seconds")
    return step - reduce if _is_number(step) and _is_number(reduce) else None


def _median(values: list[float]) -> float | None:
    return sorted(values)[(len(values) - 1) // 2] if len(values) > 1 else None


def _line(kind: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(_cell(kind, cell) for cell in cells) + "</tr>"


def _cell(kind: str, value: Any) -> str:
    text = "" if value is None else str(value)[:_LONGEST]
    color = f";color:{_COLORS[text]}" if text in _COLORS else ""
    return f'<{kind} style="{_CELL}{color}">{html.escape(text)}</{kind}>'


def _time(seconds: Any) -> str:
    if not _is_number(seconds):
        return ""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _share(part: Any, whole: Any) -> str:
    return f"{part / whole:.0%}" if _is_number(part) and _is_number(whole) and whole > 0 else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
