# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Row groups of Parquet: where they are, and how they become arrays or rows.

Files, stores, partitions in names of directories and INT96 are found as `prepare_data` does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from farandole._native.store import localized_path
from farandole.data.inputs.directory_partitions import partition_column_names
from farandole.data.inputs.sources import open_files
from farandole.data.lazy_pyarrow import is_list_type, is_text_type
from petastorm.utils import decode_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from petastorm.predicates import PredicateBase
    from petastorm.transform import TransformSpec
    from petastorm.unischema import Unischema

_FOOTERS_AT_A_TIME = 8
Columns = dict[str, Any]
"""Arrays by name, with the rows of a row group."""


@dataclass(frozen=True)
class ParquetRowGroups:
    """The row groups of a data set, in the order of their files."""

    schema: pa.Schema
    partitions: list[str]
    fragments: list[Any]
    """Fragments of pyarrow, of one row group each."""
    rows: list[int]
    encoded_bytes: list[int]


def find_row_groups(urls: str | Sequence[str]) -> ParquetRowGroups:
    """Returns the row groups of a directory, in the order of the names, or of a list of files.

    Args:
        urls: A directory, a file or a list of files.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: Files that are no Parquet.
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    opened = open_files(given, "parquet", None, None)
    if opened is None:
        raise ValueError(f"not the URL of a data set: {urls!r}")
    dataset = opened[0]
    files = list(dataset.get_fragments())
    if not isinstance(urls, str):  # they are by name now
        order = {localized_path(url): number for number, url in enumerate(urls)}
        files.sort(key=lambda file: order.get(localized_path(file.path), 0))
    with ThreadPoolExecutor(_FOOTERS_AT_A_TIME) as pool:
        footers = list(pool.map(lambda file: file.row_groups, files))
    fragments, rows, sizes = [], [], []
    for file, groups in zip(files, footers, strict=True):
        for group in groups:
            fragments.append(file.subset(row_group_ids=[group.id]))
            rows.append(group.num_rows)
            sizes.append(group.total_byte_size)
    return ParquetRowGroups(dataset.schema, partition_column_names(dataset), fragments, rows, sizes)


@dataclass(frozen=True)
class RowGroupReading:
    """The settings by which a worker reads a row group."""

    file_schema: pa.Schema
    schema: Unischema
    """Schema of the rows in the files."""
    result_schema: Unischema
    """Schema of the results, after the transformation."""
    batched: bool
    transform: TransformSpec | None
    predicate: PredicateBase | None
    filter: Any

    def read(self, fragment: Any, order_seed: Any, part: int, parts: int) -> Columns | list[Any]:
        """Returns the rows of a row group: arrays by name, or a list of named tuples; empty if it
        has none.

        Args:
            fragment: The row group.
            order_seed: Seed of the order of its rows, for NumPy; `None` keeps their order.
            part: Number of the part of the rows to read.
            parts: Number of parts.
        """
        table = fragment.to_table(
            schema=self.file_schema,
            columns={name: ds.field(name) for name in self.schema.fields},
            filter=self.filter,
        )
        if order_seed is not None:
            table = table.take(np.random.default_rng(order_seed).permutation(len(table)))
        if parts > 1:
            table = table.filter(pa.array(part_numbers(len(table), parts) == part))
        return self._make_batch(table) if self.batched else self._make_rows(table)

    def _make_batch(self, table: pa.Table) -> Columns | list[Any]:
        if self.predicate is not None:
            tested = table.select(sorted(self.predicate.get_fields())).to_pandas()
            mask = self.predicate.do_include(tested)
            table = table.filter(pa.array(np.asarray(mask, bool)))
        if not len(table):
            return []
        if self.transform is not None:
            table = self._transform_frame(table.to_pandas())
        return columns_of_table(table, self.result_schema) if len(table) else []

    def _transform_frame(self, frame: Any) -> pa.Table:
        transform: Any = self.transform
        result = frame if transform.func is None else transform.func(frame)
        result = result.drop(columns=set(transform.removed_fields) & set(result.columns))
        if set(result.columns) != set(self.result_schema.fields):
            raise ValueError(
                f"Transformed result columns ({', '.join(map(str, result.columns))}) do not match "
                f"required schema columns ({', '.join(self.result_schema.fields)})"
            )
        for name, field in self.result_schema.fields.items():
            if len(field.shape) > 1:
                result[name] = [_flatten_value(value, field) for value in result[name]]
        return pa.Table.from_pandas(result, preserve_index=False)

    def _make_rows(self, table: pa.Table) -> list[Any]:
        names = table.column_names
        columns = [_values_of_column(table.column(name)) for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        if self.predicate is not None:
            tested = self.predicate.get_fields()
            rows = [
                row
                for row in rows
                if self.predicate.do_include(
                    decode_row({name: row[name] for name in tested}, self.schema)
                )
            ]
        decoded = [decode_row(row, self.schema) for row in rows]
        if self.transform is not None:
            decoded = [self._transform_row(row) for row in decoded]
        return [self.result_schema.make_namedtuple(**row) for row in decoded]

    def _transform_row(self, row: dict[str, Any]) -> dict[str, Any]:
        transform: Any = self.transform
        result = row if transform.func is None else transform.func(row)
        removed = transform.removed_fields
        return {name: value for name, value in result.items() if name not in removed}


def part_numbers(rows: int, parts: int) -> Any:
    """Returns the part of each row, from 0 on, where a row group is read in parts.

    Args:
        rows: Number of rows.
        parts: Number of parts; at most one for each row.
    """
    return np.floor(np.arange(rows) / (max(rows, 1) / max(min(rows, parts), 1))).astype(np.int64)


def columns_of_table(table: pa.Table, schema: Unischema) -> Columns:
    """Returns columns as arrays, in the order of the schema; lists become rows of a matrix, or of
    the field's shape.

    Args:
        table: The rows.
        schema: The fields.

    Raises:
        RuntimeError: A column of lists of different lengths.
    """
    columns = {}
    for name, field in schema.fields.items():
        column = table.column(name)
        values = _array_of_column(column, name)
        if len(field.shape) > 1 and is_list_type(column.type):
            values = values.reshape(len(table), *field.shape)
        columns[name] = values if values.flags.writeable else values.copy()
    return columns


def _array_of_column(column: pa.ChunkedArray, name: str) -> Any:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_list_type(array.type):
        lengths = array.value_lengths().unique().to_pylist()
        if len(lengths) > 1 or lengths == [None]:
            raise RuntimeError(
                f"Length of all values in column '{name}' are expected to be the same length. "
                f"Got the following set of lengths: {', '.join(map(str, lengths))}"
            )
        return _plain_array(array.flatten()).reshape(len(array), -1)
    if is_text_type(array.type):
        return array.to_numpy(zero_copy_only=False).astype(np.str_)
    return _plain_array(array)


def _plain_array(array: Any) -> Any:
    """Returns the array as pandas has it: nulls of integers are NaN, dates are objects, and times
    have nanoseconds, unless their years do not fit.
    """
    if pa.types.is_timestamp(array.type):
        with suppress(pa.ArrowInvalid):
            array = array.cast(pa.timestamp("ns", array.type.tz))
        return array.to_numpy(zero_copy_only=False)
    return np.asarray(array.to_pandas())


def _values_of_column(column: pa.ChunkedArray) -> list[Any]:
    """Returns the values of a column for `decode_row`: a null is `None`, or NaN among floats."""
    if is_list_type(column.type):
        return [None if value is None else np.asarray(value) for value in column.to_pandas()]
    if pa.types.is_floating(column.type) or (
        pa.types.is_integer(column.type) and not column.null_count
    ):
        return column.to_numpy().tolist()
    return column.to_pylist()


def _flatten_value(value: Any, field: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.shape != tuple(field.shape):
        found = value.shape if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(
            f"field {field.name} must be an array of the constant shape {field.shape}: {found}"
        )
    return value.ravel()
