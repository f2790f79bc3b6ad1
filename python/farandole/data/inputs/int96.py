# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Parquet's INT96 timestamps, which pyarrow converts without a check of their range.

Read as nanoseconds, they wrap around after the year 2262. As microseconds, they hold all dates that
people use, but other values wrap around, too. As milliseconds, none does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_MICROSECONDS_PER_MILLISECOND = 1000


def with_int96_unit(fragment: Any, unit: str) -> Any:
    """Returns a fragment that reads INT96 in a unit; other fragments as they are.

    Args:
        fragment: Of a pyarrow dataset.
        unit: `us` or `ms`.
    """
    import pyarrow.dataset as ds  # noqa: PLC0415 - a process that only trains needs none

    if not isinstance(fragment, ds.ParquetFileFragment):
        return fragment
    options = fragment.format.read_options
    if options.coerce_int96_timestamp_unit == unit:
        return fragment
    file_format = ds.ParquetFileFormat(
        read_options=ds.ParquetReadOptions(
            dictionary_columns=options.dictionary_columns, coerce_int96_timestamp_unit=unit
        ),
        default_fragment_scan_options=fragment.format.default_fragment_scan_options,
    )
    remade = file_format.make_fragment(
        fragment.path, fragment.filesystem, fragment.partition_expression
    )
    groups = fragment.row_groups
    return remade if groups is None else remade.subset(row_group_ids=[one.id for one in groups])


def check_int96_range(
    batches: Iterator[pa.RecordBatch], fragment: Any, name: str, rows: int
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a file; refuses INT96 that is more microseconds than an int64 can hold.

    Args:
        batches: The rows, with INT96 in microseconds.
        fragment: Of pyarrow: the file, or some of its row groups.
        name: Of the file, for messages.
        rows: Rows of a batch, at most.

    Raises:
        ValueError: Such a value; names column, file and row.
    """
    wide = _int96_columns(fragment)
    if not wide:
        yield from batches
        return
    coarse = with_int96_unit(fragment, "ms").to_batches(columns=wide, batch_size=rows)
    row = 0
    for batch, other in zip(batches, coarse, strict=True):
        for column in wide:
            if column in batch.schema.names:
                _check_column(batch.column(column), other.column(column), column, name, row)
        row += batch.num_rows
        yield batch


def _int96_columns(fragment: Any) -> list[str]:
    metadata = getattr(fragment, "metadata", None)
    if metadata is None:
        return []
    columns = (metadata.schema.column(index) for index in range(metadata.num_columns))
    return [one.path.partition(".")[0] for one in columns if one.physical_type == "INT96"]


def _check_column(fine: Any, coarse: Any, column: str, name: str, row: int) -> None:
    import numpy as np  # noqa: PLC0415 - as above
    import pyarrow as pa  # noqa: PLC0415 - as above

    per_row = 1
    while pa.types.is_nested(fine.type):
        fine, coarse = fine.flatten(), coarse.flatten()
        per_row = 0
    micros, millis = (
        one.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) for one in (fine, coarse)
    )
    odd = np.flatnonzero(micros // _MICROSECONDS_PER_MILLISECOND != millis)
    if odd.size:
        at = f"row {row + odd[0]}" if per_row else "a list"
        raise ValueError(
            f"column {column!r} of {name}, {at}: {millis[odd[0]]} milliseconds are more "
            "microseconds than an int64 can hold"
        )
