# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lazy polars frames: queries whose rows come batch by batch, without a table of all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def is_lazy_frame(value: Any) -> bool:
    """Returns whether a value is a lazy frame."""
    kind = type(value)
    return kind.__name__ == "LazyFrame" and kind.__module__.partition(".")[0] == "polars"


def lazy_frame_schema(frame: Any) -> pa.Schema:
    """Returns the types of a lazy frame's columns.

    Args:
        frame: A polars frame.
    """
    return frame.collect_schema().to_frame().to_arrow().schema


def lazy_frame_batches(frame: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Runs the query of a lazy frame.

    Args:
        frame: A polars frame.
        columns: Columns that are wanted.
    """
    chosen = frame.select(columns)
    # Earlier versions of polars have the whole result alone.
    parts = chosen.collect_batches() if hasattr(chosen, "collect_batches") else [chosen.collect()]
    for part in parts:
        yield from part.to_arrow().to_batches()
