# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Parquet's INT96 timestamps, which pyarrow converts without a check of their range.

Read as nanoseconds, they wrap around after the year 2262. As microseconds, they hold all dates that
people use, but other values wrap around, too. As milliseconds, none does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.inputs.parquet_columns import (
    columns_of_leaf,
    file_fragments,
    unnest_values,
)
from farandole.data.lazy_pyarrow import ds, pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MICROSECONDS_PER_MILLISECOND = 1000
_CHECKED_ROWS = 65536


def fragment_with_int96_unit(fragment: Any, unit: str) -> Any:
    """Returns a fragment that reads INT96 in a unit; other fragments as they are.

    Args:
        fragment: Fragment of a pyarrow dataset.
        unit: `us` or `ms`.
    """
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
    return remade if groups is None else remade.subset(row_group_ids=[group.id for group in groups])


def read_int96_as_microseconds(dataset: Any) -> Any:
    """Returns a dataset that reads INT96 in microseconds and leaves out the same rows; a dataset
    without INT96 as it is.

    Args:
        dataset: Dataset of pyarrow.
    """
    if isinstance(dataset, ds.UnionDataset):
        remade = ds.dataset([read_int96_as_microseconds(child) for child in dataset.children])
        return _with_same_filter(dataset, remade)
    if not isinstance(dataset, ds.FileSystemDataset):
        return dataset
    fragments, fields = [], {}
    for fragment in file_fragments(dataset):
        remade = fragment_with_int96_unit(fragment, "us")
        fragments.append(remade)
        fields |= {name: remade.physical_schema.field(name) for name in _int96_columns(remade)}
    if not fields:
        return dataset
    schema = pa.schema([fields.get(field.name, field) for field in dataset.schema])
    remade = ds.FileSystemDataset(
        fragments, schema.with_metadata(dataset.schema.metadata), dataset.format, dataset.filesystem
    )
    return _with_same_filter(dataset, remade)


def _with_same_filter(dataset: Any, remade: Any) -> Any:
    condition = dataset._scan_options.get("filter")  # noqa: SLF001 - there is no public API
    return remade if condition is None else remade.filter(condition)


def check_int96_files(dataset: Any, columns: Sequence[str] | None = None) -> None:
    """Refuses files with INT96 that is more microseconds than an int64 can hold.

    For rows whose numbers in their file are unknown, because a filter or a query chooses them.

    Args:
        dataset: Dataset of pyarrow.
        columns: Columns that are checked; `None` for all.

    Raises:
        ValueError: A value that an int64 of microseconds cannot hold; the message names the
            column, the file and the row.
    """
    for fragment in file_fragments(dataset):
        fine = fragment_with_int96_unit(fragment, "us")
        wide = [column for column in _int96_columns(fine) if columns is None or column in columns]
        if not wide:
            continue
        chosen = {column: ds.field(column) for column in wide}
        batches = fine.to_batches(columns=chosen, batch_size=_CHECKED_ROWS)
        for _ in check_int96_range(batches, fine, fine.path, _CHECKED_ROWS):
            pass


def check_int96_range(
    batches: Iterator[pa.RecordBatch], fragment: Any, name: str, rows: int
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a file; refuses INT96 that is more microseconds than an int64 can hold.

    Args:
        batches: The rows, with INT96 in microseconds.
        fragment: Fragment of pyarrow: the file, or some of its row groups.
        name: Name of the file, for messages.
        rows: Rows of a batch, at most.

    Raises:
        ValueError: A value that an int64 of microseconds cannot hold; the message names the
            column, the file and the row.
    """
    wide = _int96_columns(fragment)
    if not wide:
        yield from batches
        return
    chosen = {column: ds.field(column) for column in wide}  # as texts, dots would be paths
    coarse = fragment_with_int96_unit(fragment, "ms").to_batches(columns=chosen, batch_size=rows)
    row = 0
    for batch, other in zip(batches, coarse, strict=True):
        for column in wide:
            if column in batch.schema.names:
                _check_int96_column(batch.column(column), other.column(column), column, name, row)
        row += batch.num_rows
        yield batch


def _int96_columns(fragment: Any) -> list[str]:
    metadata = getattr(fragment, "metadata", None)
    if metadata is None:
        return []
    leaves = (metadata.schema.column(index) for index in range(metadata.num_columns))
    paths = [leaf.path for leaf in leaves if leaf.physical_type == "INT96"]
    schema = fragment.physical_schema
    return list(dict.fromkeys(name for path in paths for name in columns_of_leaf(path, schema)))


def _check_int96_column(fine: Any, coarse: Any, column: str, name: str, row: int) -> None:
    is_nested = pa.types.is_nested(fine.type)
    fine, coarse = unnest_values(fine), unnest_values(coarse)
    if not pa.types.is_timestamp(fine.type):
        return
    micros, millis = (
        column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        for column in (fine, coarse)
    )
    odd = np.flatnonzero(micros // _MICROSECONDS_PER_MILLISECOND != millis)
    if odd.size:
        at = "a list" if is_nested else f"row {row + odd[0]}"
        raise ValueError(
            f"column {column!r} of {name}, {at}: {millis[odd[0]]} milliseconds are more "
            "microseconds than an int64 can hold"
        )
