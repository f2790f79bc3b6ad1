# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns that a loader without a list of columns leaves out, and the reason of each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from farandole._native.reader import Dataset, Reader
from farandole.data.arrays import VARIABLE_WIDTH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Container

_log = logging.getLogger(__name__)

_REFUSAL_PHRASE = "cannot be read into batches: "
_RAGGED_REASON = "its rows have different lengths"
_HINTS_BY_REASON = {
    _RAGGED_REASON: (
        "pad lists of different lengths with ragged={...: Pad()} of frame_loader or prepare_data"
    ),
    "texts": (
        "name texts and bytes in columns=, or encode them with categories=[...] of prepare_data"
    ),
    "it is": "turn nested and other values into columns of numbers before",
}
"""Advice to the user, by the beginning of the reason."""


def warn_of_skipped_columns(dataset: Dataset, read: Container[str], rows_text: str) -> None:
    """Logs a warning that names the columns that are not read, if there are any.

    Args:
        dataset: The opened data set.
        read: Columns that are read.
        rows_text: Name of the source of the rows, for the message.
    """
    skipped = {
        field.name: _skip_reason(dataset, field.name, field.dtype)
        for field in dataset.columns
        if field.name not in read
    }
    if not skipped:
        return
    kinds = [f"{name} ({type_text})" for name, (_, type_text) in skipped.items()]
    reasons = {reason for reason, _ in skipped.values()}
    hints = [
        hint
        for start, hint in _HINTS_BY_REASON.items()
        if any(reason.startswith(start) for reason in reasons)
    ]
    advice = "; ".join(hints or ["leave them out"])
    _log.warning(
        "%s: batches of numbers cannot hold these columns, which are left out: %s. %s. "
        "columns=[...] without them turns this warning off",
        rows_text,
        ", ".join(kinds),
        advice[0].upper() + advice[1:],
    )


def with_column_advice(error: ValueError) -> ValueError:
    """Returns an error about a requested column, with advice to the user.

    Args:
        error: The error of the native reader.
    """
    _, refused, reason = str(error).partition(_REFUSAL_PHRASE)
    hints = [
        hint for start, hint in _HINTS_BY_REASON.items() if refused and reason.startswith(start)
    ]
    return ValueError(f"{error}: {hints[0]}") if hints else error


def is_unreadable_column(dataset: Dataset, name: str) -> bool:
    """Returns whether a column cannot be read into batches at all.

    Args:
        dataset: The opened data set.
        name: Name of the column.
    """
    return _REFUSAL_PHRASE in _native_refusal_text(dataset, name)


def _native_refusal_text(dataset: Dataset, name: str) -> str:
    """Returns the native reader's error about a column; an empty text if it reads the column."""
    try:
        Reader(dataset, columns=[name], batch_size=1)
    except ValueError as error:
        return str(error)
    return ""


def _skip_reason(dataset: Dataset, name: str, dtype: str) -> tuple[str, str]:
    """Returns the reason why a column is left out, and a description of its type."""
    refusal = _native_refusal_text(dataset, name)
    if refusal:
        reason = refusal.partition(_REFUSAL_PHRASE)[2] or refusal
        type_text = (
            f"lists of {dtype} of different lengths"
            if reason == _RAGGED_REASON
            else reason.removeprefix("it is ")
        )
        return reason, type_text
    return (
        ("texts", "texts" if dtype == "utf8" else "bytes")
        if dtype in VARIABLE_WIDTH_DTYPES
        else ("", dtype)
    )
