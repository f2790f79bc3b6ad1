# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns that a loader without a list of columns leaves out, and the reason of each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from farandole._native.reader import Dataset, Reader
from farandole.data.arrays import TEXTS

if TYPE_CHECKING:
    from collections.abc import Container

_log = logging.getLogger(__name__)

_REFUSED = "cannot be read into batches: "
_LISTS = "its rows have different lengths"
_HINTS = {
    _LISTS: (
        "pad lists of different lengths with ragged={...: Pad()} of frame_loader or prepare_data"
    ),
    "texts": (
        "name texts and bytes in columns=, or encode them with categories=[...] of prepare_data"
    ),
    "it is": "turn nested and other values into columns of numbers before",
}
"""The beginning of a reason, and what a user can do."""


def tell(dataset: Dataset, read: Container[str], what: str) -> None:
    """Logs a warning that names the columns that are not read, if there are any.

    Args:
        dataset: The opened data set.
        read: Columns that are read.
        what: The rows, in words.
    """
    left = {
        field.name: _reason(dataset, field.name, field.dtype)
        for field in dataset.columns
        if field.name not in read
    }
    if not left:
        return
    kinds = [f"{name} ({told})" for name, (_, told) in left.items()]
    reasons = {reason for reason, _ in left.values()}
    hints = [
        hint
        for start, hint in _HINTS.items()
        if any(reason.startswith(start) for reason in reasons)
    ]
    advice = "; ".join(hints or ["leave them out"])
    _log.warning(
        "%s: batches of numbers cannot hold these columns, which are left out: %s. %s. "
        "columns=[...] without them turns this warning off",
        what,
        ", ".join(kinds),
        advice[0].upper() + advice[1:],
    )


def advised(error: ValueError) -> ValueError:
    """Returns the error about a column that was asked for, with what a user can do.

    Args:
        error: Of the native reader.
    """
    _, refused, reason = str(error).partition(_REFUSED)
    hints = [hint for start, hint in _HINTS.items() if refused and reason.startswith(start)]
    return ValueError(f"{error}: {hints[0]}") if hints else error


def is_refused(dataset: Dataset, name: str) -> bool:
    """Returns whether a column cannot be read into batches at all.

    Args:
        dataset: The opened data set.
        name: Of the column.
    """
    try:
        Reader(dataset, columns=[name], batch_size=1)
    except ValueError as error:
        return _REFUSED in str(error)
    return False


def _reason(dataset: Dataset, name: str, dtype: str) -> tuple[str, str]:
    """Returns the reason why a column is left out, and its type in words."""
    try:
        Reader(dataset, columns=[name], batch_size=1)
    except ValueError as error:
        reason = str(error).partition(_REFUSED)[2] or str(error)
        told = (
            f"lists of {dtype} of different lengths"
            if reason == _LISTS
            else reason.removeprefix("it is ")
        )
        return reason, told
    return ("texts", "texts" if dtype == "utf8" else "bytes") if dtype in TEXTS else ("", dtype)
