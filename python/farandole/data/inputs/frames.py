# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Frames, tables and streams as sources of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.data.inputs.content import table_digest
from farandole.data.inputs.lazy import is_lazy_frame, lazy_frame_batches, lazy_frame_schema
from farandole.data.inputs.tables import (
    is_duckdb_relation,
    is_table,
    relation_batches,
    relation_schema,
)
from farandole.data.inputs.units import MAX_BATCH_ROWS, RowSource, SourceUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def holds_rows(value: Any) -> bool:
    """Returns whether a value holds rows: a pyarrow, pandas, polars or Iceberg table, a Ray data
    set, or a stream.
    """
    kinds = (
        _is_pandas_dataframe,
        is_arrow_dataset,
        _is_ray_dataset,
        is_lazy_frame,
        is_table,
    )
    return any(kind(value) for kind in kinds) or hasattr(value, "__arrow_c_stream__")


def is_arrow_dataset(value: Any) -> bool:
    """Returns whether a value is a dataset of pyarrow.

    Args:
        value: Anything.
    """
    return any(
        f"{kind.__module__}.{kind.__name__}" == "pyarrow._dataset.Dataset"
        for kind in type(value).__mro__
    )


def is_spark_dataframe(value: Any) -> bool:
    """Returns whether a value is a DataFrame of Spark, with Spark Connect or without.

    Args:
        value: Anything.
    """
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.startswith("pyspark.")
        for kind in type(value).__mro__
    )


def frame_source(value: Any) -> RowSource | None:
    """Returns the rows of a frame, a table or a stream; `None` for other values.

    Args:
        value: Anything but a pyarrow dataset.

    Raises:
        ValueError: A Ray data set without rows.
    """
    import pyarrow as pa  # noqa: PLC0415 - a process that only trains needs none

    for is_kind, opened in (
        (is_duckdb_relation, _relation_source),
        (_is_ray_dataset, _ray_dataset_source),
        (is_lazy_frame, _lazy_frame_source),
    ):
        if is_kind(value):
            return opened(value)
    table = in_memory_table(value)
    if table is not None:
        return _table_source(table)
    return (
        _stream_source(pa.RecordBatchReader.from_stream(value))
        if hasattr(value, "__arrow_c_stream__")
        else None
    )


def in_memory_table(source: Any) -> pa.Table | None:
    """Returns the rows that are in memory already, and stay there; `None` for a stream."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    if _is_pandas_dataframe(source):
        return pa.Table.from_pandas(source, preserve_index=False)
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "__arrow_c_stream__") and hasattr(source, "__len__"):
        return pa.table(source)
    return None


def _lazy_frame_source(frame: Any) -> RowSource:
    """Returns a polars query, which is run once for each pass over its rows."""

    def list_units(columns: list[str]) -> list[SourceUnit]:
        return [SourceUnit("the lazy frame", lambda: lazy_frame_batches(frame, columns))]

    return RowSource(lazy_frame_schema(frame), None, list_units, ordered=False)


def _relation_source(relation: Any) -> RowSource:
    """Returns a query of DuckDB, which is run once for each pass over its rows."""

    def list_units(columns: list[str]) -> list[SourceUnit]:
        return [SourceUnit("the relation", lambda: relation_batches(relation, columns))]

    return RowSource(relation_schema(relation), None, list_units, ordered=False)


def _is_pandas_dataframe(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def _is_ray_dataset(value: Any) -> bool:
    return any(
        f"{kind.__module__}.{kind.__name__}" == "ray.data.dataset.Dataset"
        for kind in type(value).__mro__
    )


def is_ray_shard(value: Any) -> bool:
    """Returns whether a value is one rank's rows of a Ray data set, as
    `ray.train.get_dataset_shard` returns them.

    Args:
        value: Anything.
    """
    return any(
        f"{kind.__module__}.{kind.__name__}" == "ray.data.iterator.DataIterator"
        for kind in type(value).__mro__
    )


def ray_tables(rows: Any) -> Iterator[pa.Table]:
    """Yields the rows of a Ray data set or of a shard, from the first row on.

    Args:
        rows: The data set, or the shard.
    """
    for table in rows.iter_batches(batch_format="pyarrow", batch_size=MAX_BATCH_ROWS):
        yield _without_ray_tensors(table)


def _without_ray_tensors(table: pa.Table) -> pa.Table:
    """Returns a Ray table whose tensor columns, a Ray extension type, are plain list columns."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    for index, column in enumerate(table.columns):
        if isinstance(column.type, pa.BaseExtensionType):
            chunks = [chunk.storage for chunk in column.chunks]
            table = table.set_column(index, table.schema.names[index], pa.chunked_array(chunks))
    return table


def _ray_dataset_source(dataset: Any) -> RowSource:
    """Ray's blocks pass through this process one after the other; it may make other rows when it
    is read again.
    """

    def read_batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for table in ray_tables(dataset.select_columns(columns)):
            yield from table.to_batches(max_chunksize=MAX_BATCH_ROWS)

    def list_units(columns: list[str]) -> list[SourceUnit]:
        return [SourceUnit("the Ray data set", lambda: read_batches(columns))]

    first = next(iter(dataset.limit(1).iter_batches(batch_format="pyarrow", batch_size=1)), None)
    if first is None:
        raise ValueError("the Ray data set has no rows")
    return RowSource(_without_ray_tensors(first).schema, None, list_units, ordered=False)


def _table_source(table: pa.Table) -> RowSource:
    def list_units(columns: list[str]) -> list[SourceUnit]:
        chosen = table.select(columns)
        return [
            SourceUnit("the table", lambda: iter(chosen.to_batches(max_chunksize=MAX_BATCH_ROWS)))
        ]

    return RowSource(table.schema, table_digest(table), list_units)


def _stream_source(reader: pa.RecordBatchReader) -> RowSource:
    def list_units(columns: list[str]) -> list[SourceUnit]:
        return [SourceUnit("the stream", lambda: (batch.select(columns) for batch in reader))]

    return RowSource(reader.schema, None, list_units, is_rereadable=False)
