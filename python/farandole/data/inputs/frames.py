# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Frames, tables and streams as sources of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.data.inputs.content import content_of
from farandole.data.inputs.lazy import is_lazy, lazy_batches, lazy_schema
from farandole.data.inputs.tables import (
    iceberg_batches,
    iceberg_print,
    iceberg_schema,
    is_iceberg,
    is_relation,
    relation_batches,
    relation_schema,
)
from farandole.data.inputs.units import BATCH_ROWS, Source, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def is_frame(value: Any) -> bool:
    """Returns whether a value holds rows: a pyarrow, pandas, polars or Iceberg table, a Ray data
    set, or a stream.
    """
    kinds = (_is_pandas, is_arrow_dataset, _is_ray_dataset, is_lazy, is_iceberg)
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


def is_spark(value: Any) -> bool:
    """Returns whether a value is a DataFrame of Spark, with Spark Connect or without.

    Args:
        value: Anything.
    """
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.startswith("pyspark.")
        for kind in type(value).__mro__
    )


def frame_source(value: Any) -> Source | None:
    """Returns the rows of a frame, a table or a stream; `None` for other values.

    Args:
        value: Anything but a pyarrow dataset.

    Raises:
        ValueError: A Ray data set without rows.
    """
    import pyarrow as pa  # noqa: PLC0415 - a process that only trains needs none

    for is_kind, opened in (
        (is_iceberg, _iceberg),
        (is_relation, _relation),
        (_is_ray_dataset, _ray_dataset),
        (is_lazy, _lazy),
    ):
        if is_kind(value):
            return opened(value)
    table = held(value)
    if table is not None:
        return _table(table)
    return (
        _stream(pa.RecordBatchReader.from_stream(value))
        if hasattr(value, "__arrow_c_stream__")
        else None
    )


def held(source: Any) -> pa.Table | None:
    """Returns the rows that are in memory already, and stay there; `None` for a stream."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    if _is_pandas(source):
        return pa.Table.from_pandas(source, preserve_index=False)
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "__arrow_c_stream__") and hasattr(source, "__len__"):
        return pa.table(source)
    return None


def _lazy(frame: Any) -> Source:
    """Returns a polars query, which is run once for each pass over its rows."""

    def units(columns: list[str]) -> list[Unit]:
        return [Unit("the lazy frame", lambda: lazy_batches(frame, columns))]

    return Source(lazy_schema(frame), None, units, ordered=False)


def _relation(relation: Any) -> Source:
    """Returns a query of DuckDB, which is run once for each pass over its rows."""

    def units(columns: list[str]) -> list[Unit]:
        return [Unit("the relation", lambda: relation_batches(relation, columns))]

    return Source(relation_schema(relation), None, units, ordered=False)


def _iceberg(table: Any) -> Source:
    def units(columns: list[str]) -> list[Unit]:
        return [Unit("the Iceberg table", lambda: iceberg_batches(table, columns))]

    return Source(iceberg_schema(table), iceberg_print(table), units, ordered=False)


def _is_pandas(value: Any) -> bool:
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
    """The rows of a Ray data set or of a shard, from the first one on.

    Args:
        rows: The data set, or the shard.
    """
    for table in rows.iter_batches(batch_format="pyarrow", batch_size=BATCH_ROWS):
        yield _plain(table)


def _plain(table: pa.Table) -> pa.Table:
    """Returns a table of Ray without Ray's tensors, which are lists under a type of its own."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    for index, column in enumerate(table.columns):
        if isinstance(column.type, pa.BaseExtensionType):
            chunks = [chunk.storage for chunk in column.chunks]
            table = table.set_column(index, table.schema.names[index], pa.chunked_array(chunks))
    return table


def _ray_dataset(dataset: Any) -> Source:
    """Ray's blocks pass through this process one after the other; it may make other rows when it
    is read again.
    """

    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for table in ray_tables(dataset.select_columns(columns)):
            yield from table.to_batches(max_chunksize=BATCH_ROWS)

    def units(columns: list[str]) -> list[Unit]:
        return [Unit("the Ray data set", lambda: batches(columns))]

    first = next(iter(dataset.limit(1).iter_batches(batch_format="pyarrow", batch_size=1)), None)
    if first is None:
        raise ValueError("the Ray data set has no rows")
    return Source(_plain(first).schema, None, units, ordered=False)


def _table(table: pa.Table) -> Source:
    def units(columns: list[str]) -> list[Unit]:
        chosen = table.select(columns)
        return [Unit("the table", lambda: iter(chosen.to_batches(max_chunksize=BATCH_ROWS)))]

    return Source(table.schema, content_of(table), units)


def _stream(reader: pa.RecordBatchReader) -> Source:
    def units(columns: list[str]) -> list[Unit]:
        return [Unit("the stream", lambda: (batch.select(columns) for batch in reader))]

    return Source(reader.schema, None, units, again=False)
