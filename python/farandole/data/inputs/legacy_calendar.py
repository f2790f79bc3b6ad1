# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Dates and times that Spark wrote in its calendar before version 3.

Their numbers have another meaning before 1582-10-15, and for times with a time zone before 1900.
Spark converts them when it reads such a file. Other readers do not, so these values are refused.
`farandole._native.reader` has the same rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.data.inputs.parquet_columns import (
    columns_of_leaf,
    file_fragments,
    unnest_values,
)
from farandole.data.lazy_pyarrow import pa, pc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FIRST_GREGORIAN_DAY = -141_427
_FIRST_COMMON_MICROSECOND = -2_208_988_800_000_000
_VERSION_KEY, _DATES_KEY, _INT96_KEY = (
    b"org.apache.spark.version",
    b"org.apache.spark.legacyDateTime",
    b"org.apache.spark.legacyINT96",
)


def refuse_ambiguous_times(
    batches: Iterator[pa.RecordBatch], fragment: Any, name: str
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a file; refuses dates and times whose meaning is unclear.

    Args:
        batches: The rows.
        fragment: Fragment of pyarrow: the file, or some of its row groups.
        name: Name of the file, for messages.

    Raises:
        ValueError: A value of unclear meaning; the message names the column, the
            file and the row.
    """
    firsts = _first_unambiguous_values(fragment)
    if not firsts:
        yield from batches
        return
    row = 0
    for batch in batches:
        for column, first in firsts.items():
            if column in batch.schema.names:
                _check_calendar_column(
                    batch.column(column), first, f"column {column!r} of {name}", row
                )
        row += batch.num_rows
        yield batch


def refuse_ambiguous_files(dataset: Any, columns: Sequence[str] | None = None) -> None:
    """Refuses files in which the statistics do not exclude dates and times of unclear meaning.

    For rows that a query engine reads, which are not checked one by one.

    Args:
        dataset: Dataset of pyarrow.
        columns: Columns that are checked; `None` for all.

    Raises:
        ValueError: A file that may have values of unclear meaning; the message names the
            column and the file.
    """
    for fragment in file_fragments(dataset):
        found = _first_unambiguous_values(fragment)
        firsts = {one: first for one, first in found.items() if columns is None or one in columns}
        if not firsts:
            continue
        metadata, path, schema = fragment.metadata, fragment.path, fragment.physical_schema
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                leaf = chunk.path_in_schema
                names = [one for one in columns_of_leaf(leaf, schema) if one in firsts]
                if names and not _excludes_ambiguous_times(chunk.statistics, firsts[names[0]]):
                    raise ValueError(
                        f"column {names[0]!r} of {path} may have dates before 1582-10-15 or times "
                        "before 1900, in Spark's calendar before version 3: write the file again "
                        "with spark.sql.parquet.datetimeRebaseModeInWrite=CORRECTED"
                    )


def _excludes_ambiguous_times(statistics: Any, first: int) -> bool:
    import datetime as dt  # noqa: PLC0415 - rarely needed

    if statistics is None or not statistics.has_min_max:
        return False
    minimum = statistics.min
    if isinstance(minimum, dt.datetime):
        return minimum.replace(tzinfo=dt.UTC) >= dt.datetime(1900, 1, 1, tzinfo=dt.UTC)
    return isinstance(minimum, dt.date) and (minimum - dt.date(1970, 1, 1)).days >= first


def _check_calendar_column(values: Any, first: int, column_label: str, row: int) -> None:
    is_list = pa.types.is_nested(values.type)
    flat = unnest_values(values)
    if not pa.types.is_temporal(flat.type):
        return
    is_date = pa.types.is_date32(flat.type)
    numbers = (
        flat.cast(pa.int32()).cast(pa.int64())
        if is_date
        else flat.cast(pa.timestamp("us", flat.type.tz)).cast(pa.int64())
    )
    odd = pc.indices_nonzero(pc.less(numbers, first))
    if len(odd):
        moment = _timestamp_text(flat[odd[0].as_py()])
        when = "1582-10-15" if is_date else "1900-01-01"
        at = "a list" if is_list else f"row {row + odd[0].as_py()}"
        raise ValueError(
            f"{column_label} has {moment} in {at}, before {when}, where Spark's calendar "
            "before version 3 (spark.sql.parquet.datetimeRebaseModeInWrite=LEGACY) has other "
            "dates: write the file again with CORRECTED"
        )


def _timestamp_text(value: Any) -> str:
    """Returns a timestamp as text; as a number, if Python has no such date."""
    try:
        return str(value)
    except (OverflowError, ValueError):
        return f"{value.value} of {value.type}"


def _first_unambiguous_values(fragment: Any) -> dict[str, int]:
    """Returns the first value with a clear meaning, by column; nothing for most files."""
    metadata = getattr(fragment, "metadata", None)
    file_metadata = {} if metadata is None else metadata.metadata or {}
    if metadata is None or _VERSION_KEY not in file_metadata:
        return {}
    version = tuple(
        int(part) for part in file_metadata[_VERSION_KEY].split(b".")[:2] if part.isdigit()
    )
    old_dates = version < (3, 0) or _DATES_KEY in file_metadata
    old_int96 = version < (3, 1) or _INT96_KEY in file_metadata
    firsts = {}
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        kind = str(column.logical_type)
        roots = columns_of_leaf(column.path, fragment.physical_schema)
        if column.physical_type == "INT96":
            if old_int96:
                firsts |= dict.fromkeys(roots, _FIRST_COMMON_MICROSECOND)
        elif old_dates and kind.startswith("Date"):
            firsts |= dict.fromkeys(roots, _FIRST_GREGORIAN_DAY)
        elif old_dates and "isAdjustedToUTC=true" in kind and kind.startswith("Timestamp"):
            firsts |= dict.fromkeys(roots, _FIRST_COMMON_MICROSECOND)
    return firsts
