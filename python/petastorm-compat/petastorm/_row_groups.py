# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Row groups of Parquet: where they are, and how they become arrays or rows.

Farandole's reader decodes each column whose values its batches hold unchanged: booleans, integers,
float32, float64, texts, bytes, and lists of one length of numbers, all without nulls. pyarrow
decodes the others, because Farandole's batches have numbers for dates, times and decimals, and
neither nulls nor lists of different lengths. It also decodes all columns of a reader with
`filters`, which are its own, and columns from the names of directories.
`ParquetRowGroups.read_table` is the only place that chooses.

The order, shards and passes stay in `petastorm.reader`: they are those of petastorm, row group by
row group, while Farandole's own plan mixes the rows of all files. Files and stores are found as
`prepare_data` finds them.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from farandole._native.reader import Dataset, Reader
from farandole._native.store import localized_path
from farandole.data.batch_transform import batch_to_arrow
from farandole.data.inputs.directory_partitions import common_directory, partition_column_names
from farandole.data.inputs.sources import open_files
from farandole.data.lazy_pyarrow import is_list_type, is_text_type
from farandole.data.skipped_columns import is_unreadable_column
from petastorm.utils import decode_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from petastorm.predicates import PredicateBase
    from petastorm.transform import TransformSpec
    from petastorm.unischema import Unischema

_UNLIMITED_BYTES = 1 << 62
"""Byte budget of a read of one row group: `petastorm.reader` limits how many are read at a time."""
_BYTES_TYPES = (pa.binary(), pa.large_binary())
Columns = dict[str, Any]
"""Arrays by name, with the rows of a row group."""


class RowGroup(NamedTuple):
    """A row group of a file."""

    file: Any
    """The file, as a fragment of pyarrow."""
    number: int
    rows: int
    encoded_bytes: int
    first_row: int
    """Number of the rows before it in the data set."""


class ParquetRowGroups:
    """The row groups of a data set, in the order of their files."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        """Finds the row groups of a directory, in the order of the names, or of a list of files.

        Args:
            urls: A directory, a file or a list of files.

        Raises:
            FileNotFoundError: There is no file.
            ValueError: Files that are no Parquet, or that have two columns of one name.
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
        self.schema: pa.Schema = dataset.schema
        self.partitions = partition_column_names(dataset)
        self.groups: list[RowGroup] = []
        self.native_columns: frozenset[str] = frozenset()
        """Columns that Farandole's reader decodes."""
        base = common_directory(file.path.rpartition("/")[0] for file in files)
        try:
            self._dataset = Dataset.open_files(
                base or "/", [(file.path[len(base) + 1 :], {}) for file in files]
            )
        except ValueError:
            if dataset.count_rows():
                raise
            return  # files without rows
        first_row = 0
        for file, number, rows, encoded_bytes in self._dataset.row_groups:
            self.groups.append(RowGroup(files[file], number, rows, encoded_bytes, first_row))
            first_row += rows
        self.native_columns = frozenset(
            field.name
            for field in self._dataset.columns
            if field.name in self.schema.names
            and field.name not in self.partitions
            and not field.nullable
            and _is_unchanged_in_batches(self.schema.field(field.name).type)
            and not is_unreadable_column(self._dataset, field.name)
        )

    def read_table(self, group: RowGroup, names: Sequence[str], filters: Any = None) -> pa.Table:
        """Returns columns of a row group.

        Args:
            group: The row group.
            names: The columns.
            filters: Condition of pyarrow on rows.
        """
        native = [name for name in names if name in self.native_columns] if filters is None else []
        columns = self._read_native_columns(group, native) if native else {}
        others = [name for name in names if name not in columns]
        if others:
            table = group.file.subset(row_group_ids=[group.number]).to_table(
                schema=self.schema,
                columns={name: ds.field(name) for name in others},
                filter=filters,
            )
            columns |= dict(zip(others, table.columns, strict=True))
        return pa.table({name: columns[name] for name in names})

    def _read_native_columns(self, group: RowGroup, names: list[str]) -> dict[str, pa.Array]:
        """Returns columns by Farandole's reader; none if it refuses their values.

        Footers may not tell that lists have different lengths.
        """
        try:
            reader = Reader(
                self._dataset,
                columns=names,
                batch_size=group.rows,
                shuffle=False,
                byte_budget=_UNLIMITED_BYTES,
                threads=1,
            )
            with closing(reader.read_epoch(0, group.first_row, 1)) as batches:
                batch = batch_to_arrow(next(batches), reader.columns)
        except ValueError:
            return {}
        return dict(zip(names, batch.columns, strict=True))


def _is_unchanged_in_batches(kind: pa.DataType) -> bool:
    """Returns whether batches of Farandole have the values of a column of this type, if it has no
    nulls and its lists have one length.
    """
    if is_text_type(kind) or kind in _BYTES_TYPES:
        return True
    element = kind.value_type if is_list_type(kind) else kind
    types = pa.types
    return (
        types.is_boolean(element)
        or types.is_integer(element)
        or types.is_float32(element)
        or types.is_float64(element)
    )


@dataclass(frozen=True)
class RowGroupReading:
    """The settings by which a worker reads a row group."""

    source: ParquetRowGroups
    schema: Unischema
    """Schema of the rows in the files."""
    result_schema: Unischema
    """Schema of the results, after the transformation."""
    batched: bool
    transform: TransformSpec | None
    predicate: PredicateBase | None
    filters: Any

    def read(self, group: RowGroup, order_seed: Any, part: int, parts: int) -> Columns | list[Any]:
        """Returns the rows of a row group: arrays by name, or a list of named tuples; empty if it
        has none.

        Args:
            group: The row group.
            order_seed: Seed of the order of its rows, for NumPy; `None` keeps their order.
            part: Number of the part of the rows to read.
            parts: Number of parts.
        """
        table = self.source.read_table(group, list(self.schema.fields), self.filters)
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
    number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if number and not array.null_count and len(array):  # without a copy of writable memory
        values = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype())
        return values[array.offset : array.offset + len(array)]
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
