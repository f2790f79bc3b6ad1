# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Losses and metrics of a run, one entry per epoch.

An entry is `{"epoch": 0, "train": {"loss": 0.3, "all_metrics": [{"accuracy": 0.9}]}, "validation":
{...}, "seconds": 1.2, "rows": 1294}`; `validation` is there when there were rows to validate on.
Every number is a mean over rows, of all processes together.
"""

# ruff: noqa: PLC0415 - pandas is loaded for frames only

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

Entry = dict[str, Any]


def flatten_history_entry(entry: Entry) -> dict[str, float]:
    """Returns one entry as one row: `epoch`, `loss`, each metric, the same with `val_` before it,
    `seconds`, `rows`.

    A number that is `None` is left out.

    Args:
        entry: One epoch.
    """
    size = {key: entry[key] for key in ("seconds", "rows") if entry.get(key) is not None}
    return {"epoch": entry["epoch"], **entry_scores(entry), **size}


def entry_scores(entry: Entry) -> dict[str, float]:
    """Returns the losses and metrics of one entry, as in `flatten_history_entry`.

    Args:
        entry: One epoch.
    """
    row: dict[str, float | None] = {}
    for prefix, part in (("", "train"), ("val_", "validation")):
        scores = entry.get(part)
        if scores:
            row[f"{prefix}loss"] = scores["loss"]
            for group in scores["all_metrics"]:
                row |= {f"{prefix}{name}": value for name, value in group.items()}
    return {name: value for name, value in row.items() if value is not None}


def history_frame(history: list[Entry]) -> pd.DataFrame:
    """Returns the history as a pandas frame, one row per epoch.

    Args:
        history: The result of `getHistory()`.
    """
    import pandas as pd

    return pd.DataFrame([flatten_history_entry(entry) for entry in history])


def entries_from_keras(
    history: Mapping[str, Sequence[Any]], times: Sequence[Mapping[str, float]] | None = None
) -> list[Entry]:
    """Converts a Keras history, a list per name, to entries.

    Args:
        history: Lists by name; names of validation start with `val_`.
        times: Seconds and rows of each epoch, if known.
    """
    count = max(map(len, history.values()), default=0) if times is None else len(times)
    made: list[Entry] = []
    for epoch in range(count):
        row = {name: values[epoch] for name, values in history.items() if len(values) == count}
        entry: Entry = {
            "epoch": epoch,
            "train": _part_scores(row, ""),
            **({} if times is None else times[epoch]),
        }
        if "val_loss" in row:
            entry["validation"] = _part_scores(row, "val_")
        made.append(entry)
    return made


def _part_scores(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    names = [
        name
        for name in row
        if name.startswith("val_") == bool(prefix) and not isinstance(row[name], list)
    ]
    metrics = [{name.removeprefix(prefix): row[name]} for name in names if name != f"{prefix}loss"]
    return {"loss": row.get(f"{prefix}loss", float("nan")), "all_metrics": metrics}
