# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The ranks of a fit in a notebook: host, state, and the parts of the time of a step.

At most a few ranks are listed; the ranks that need attention come first. A line counts the other
ranks.
"""

from __future__ import annotations

import html
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from farandole.common.counted_noun import format_counted_noun
from farandole.runner.show.run_reporter import RunReportReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_LISTED_RANKS: Final = 8
"""Ranks that are listed."""

_STRAGGLER_FACTOR: Final = 1.3
"""Ratio of a rank's own work to the median above which the rank is a straggler."""
_STATE_ORDER: Final = ("failed", "lost", "slow", "starting", "training", "ended")
"""States, in the order of the attention that they need."""
_STATE_COLORS: Final = {"failed": "#cc0000", "lost": "#cc0000", "slow": "#c06000"}
_MAX_CELL_CHARACTERS: Final = 64
_CELL_STYLE: Final = "padding:1px 10px 1px 0;text-align:left"


class RankTable(RunReportReceiver):
    """The table of the ranks of a run.

    Args:
        changed: Is called after each change.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._ranks: list[dict[str, Any]] = []

    def put_row(self, run: str, key: str, body: Mapping[str, Any], *, logged: bool = True) -> None:
        """Like `RunReportReceiver.put_row`."""
        del run, logged
        if key == "ranks":
            self._ranks = list(body["ranks"])
            self._changed()

    @property
    def table_html(self) -> str:
        """The table; empty before the ranks have places."""
        return render_rank_table(self._ranks)


def render_rank_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of some ranks, in HTML.

    Args:
        ranks: The ranks, as `TrainingRun` reports them.
    """
    if not ranks:
        return ""
    measured = [own for one in ranks if (own := _step_seconds_without_waits(one)) is not None]
    usual = statistics.median_low(measured) if len(measured) > 1 else None
    found = [(rank_state(one, usual), one) for one in ranks]
    found.sort(key=lambda pair: (_STATE_ORDER.index(pair[0]), pair[1]["rank"]))
    listed, others = (
        sorted(found[:MAX_LISTED_RANKS], key=lambda pair: pair[1]["rank"]),
        Counter(state for state, _ in found[MAX_LISTED_RANKS:]),
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
    lines = [_table_row("th", heads)]
    for state, record in listed:
        gpu = [record.get("gpu")] if with_gpu else []
        step = record.get("step_seconds")
        shares = [
            _format_share(record.get(name), step) for name in ("data_seconds", "reduce_seconds")
        ]
        lines.append(
            _table_row(
                "td",
                [
                    record["rank"],
                    state,
                    record.get("host"),
                    record.get("pid"),
                    *gpu,
                    _format_seconds(step),
                    *shares,
                ],
            )
        )
    counts = ", ".join(f"{others[name]} {name}" for name in _STATE_ORDER if others[name])
    more = (
        f"<div>{format_counted_noun(sum(others.values()), 'more rank')}: {counts}</div>"
        if others
        else ""
    )
    return (
        '<table class="farandole-ranks" '
        f'style="border-collapse:collapse">{"".join(lines)}</table>{more}'
    )


def rank_state(rank: Mapping[str, Any], usual: float | None) -> str:
    """Returns the state of a rank in a word.

    Args:
        rank: The rank, as `TrainingRun` reports it.
        usual: The median of the ranks' own work in a step, in seconds; `None` if fewer than two
            ranks measure it.
    """
    state = rank.get("state")
    if state in _STATE_ORDER:
        return str(state)
    if not _is_number(rank.get("step_seconds")):
        return "starting"
    own = _step_seconds_without_waits(rank)
    return (
        "slow"
        if usual is not None and own is not None and own > _STRAGGLER_FACTOR * usual
        else "training"
    )


def _step_seconds_without_waits(rank: Mapping[str, Any]) -> float | None:
    """Returns the seconds of a step without its wait for the others; `None` if the rank does not
    measure it.
    """
    step: Any = rank.get("step_seconds")
    reduce: Any = rank.get("reduce_seconds")
    return step - reduce if _is_number(step) and _is_number(reduce) else None


def _table_row(kind: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(_table_cell(kind, cell) for cell in cells) + "</tr>"


def _table_cell(kind: str, value: Any) -> str:
    text = "" if value is None else str(value)[:_MAX_CELL_CHARACTERS]
    color = f";color:{_STATE_COLORS[text]}" if text in _STATE_COLORS else ""
    return f'<{kind} style="{_CELL_STYLE}{color}">{html.escape(text)}</{kind}>'


def _format_seconds(seconds: Any) -> str:
    if not _is_number(seconds):
        return ""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _format_share(part: Any, whole: Any) -> str:
    return f"{part / whole:.0%}" if _is_number(part) and _is_number(whole) and whole > 0 else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
