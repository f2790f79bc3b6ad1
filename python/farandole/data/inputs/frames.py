# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Frames, tables and streams as sources of rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from farandole.data.inputs.content_digests import table_digest
from farandole.data.inputs.optional_package_types import is_instance_by_name
from farandole.data.inputs.source_units import MAX_BATCH_ROWS, RowSource, units_of_single_stream
from farandole.data.inputs.tables import (
    is_duckdb_relation,
    is_table,
    relation_schema,
    run_relation_query,
)
from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_row_container(value: Any) -> bool:
    """Returns whether a value holds rows: a pyarrow, pandas, polars or Iceberg table, a Ray data
    set, or a stream.
    """
    kinds = (
        _is_pandas_dataframe,
        is_arrow_dataset,
        _is_ray_dataset,
        _is_lazy_frame,
        is_table,
    )
    return any(kind(value) for kind in kinds) or hasattr(value, "__arrow_c_stream__")


def is_arrow_dataset(value: Any) -> bool:
    """Returns whether a value is a dataset of pyarrow.

    Args:
        value: Anything.
    """
    return is_instance_by_name(value, "pyarrow", "Dataset")


def is_spark_dataframe(value: Any) -> bool:
    """Returns whether a value is a DataFrame of Spark, with Spark Connect or without.

    Args:
        value: Anything.
    """
    return is_instance_by_name(value, "pyspark", "DataFrame")


def frame_source(value: Any) -> RowSource | None:
    """Returns the rows of a frame, a table or a stream; `None` for other values.

    Args:
        value: Anything but a pyarrow dataset.

    Raises:
        ValueError: A Ray data set without rows.
    """
    for is_kind, opened in (
        (is_duckdb_relation, _relation_source),
        (_is_ray_dataset, _ray_dataset_source),
        (_is_lazy_frame, _lazy_frame_source),
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
    if _is_pandas_dataframe(source):
        return pa.Table.from_pandas(source, preserve_index=False)
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "__arrow_c_stream__") and hasattr(source, "__len__"):
        return pa.table(source)
    return None


def _is_lazy_frame(value: Any) -> bool:
    return is_instance_by_name(value, "polars", "LazyFrame")


def _lazy_frame_source(frame: Any) -> RowSource:
    """Returns a polars query, which is run once for each pass over its rows."""

    def read_batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        chosen = frame.select(columns)
        # Earlier versions of polars have the whole result alone.
        has_batches = hasattr(chosen, "collect_batches")
        for part in chosen.collect_batches() if has_batches else [chosen.collect()]:
            yield from part.to_arrow().to_batches()

    schema = frame.collect_schema().to_frame().to_arrow().schema
    return RowSource(
        schema, None, units_of_single_stream("the lazy frame", read_batches), ordered=False
    )


def _relation_source(relation: Any) -> RowSource:
    """Returns a query of DuckDB, which is run once for each pass over its rows."""
    units = units_of_single_stream("the relation", partial(run_relation_query, relation))
    return RowSource(relation_schema(relation), None, units, ordered=False)


def _is_pandas_dataframe(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def _is_ray_dataset(value: Any) -> bool:
    return is_instance_by_name(value, "ray", "Dataset")


def is_ray_shard(value: Any) -> bool:
    """Returns whether a value is one rank's rows of a Ray data set, as
    `ray.train.get_dataset_shard` returns them.

    Args:
        value: Anything.
    """
    return is_instance_by_name(value, "ray", "DataIterator")


def ray_tables(rows: Any) -> Iterator[pa.Table]:
    """Yields the rows of a Ray data set or of a shard, from the first row on.

    Args:
        rows: The data set, or the shard.
    """
    for table in rows.iter_batches(batch_format="pyarrow", batch_size=MAX_BATCH_ROWS):
        yield _without_ray_tensors(table)


def _without_ray_tensors(table: pa.Table) -> pa.Table:
    """Returns a Ray table whose tensor columns, a Ray extension type, are plain list columns."""
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

    first = next(iter(dataset.limit(1).iter_batches(batch_format="pyarrow", batch_size=1)), None)
    if first is None:
        raise ValueError("the Ray data set has no rows")
    units = units_of_single_stream("the Ray data set", read_batches)
    return RowSource(_without_ray_tensors(first).schema, None, units, ordered=False)


def _table_source(table: pa.Table) -> RowSource:
    def read_batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        return iter(table.select(columns).to_batches(max_chunksize=MAX_BATCH_ROWS))

    return RowSource(
        table.schema, table_digest(table), units_of_single_stream("the table", read_batches)
    )


def _stream_source(reader: pa.RecordBatchReader) -> RowSource:
    def read_batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        return (batch.select(columns) for batch in reader)

    units = units_of_single_stream("the stream", read_batches)
    return RowSource(reader.schema, None, units, is_rereadable=False)
