# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Units of a source of rows: each is a stream of record batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_BATCH_ROWS = 65536
"""Rows of a record batch, at most."""


@dataclass(frozen=True)
class SourceUnit:
    """A stream of record batches that can be read again, unless it is a stream itself."""

    name: str
    batches: Callable[[], Iterator[pa.RecordBatch]]
    is_one_partition: bool = False
    """Whether it is one partition, however many rows it has."""


@dataclass(frozen=True)
class RowSource:
    """The found data: its columns, and how to read some of them."""

    schema: pa.Schema
    fingerprint: str | None
    """The identity of the data; `None` if no later call can ask for the same data."""
    units: Callable[[list[str]], list[SourceUnit]]
    """Streams of these columns; refuses files that disagree about them."""
    ordered: bool = True
    """Whether a stream has the same rows in the same order each time it is read."""
    is_rereadable: bool = True
    """Whether rows can be read more than once."""


def units_of_single_stream(
    name: str, read_batches: Callable[[list[str]], Iterator[pa.RecordBatch]]
) -> Callable[[list[str]], list[SourceUnit]]:
    """Returns the units of a source that is a single stream.

    Args:
        name: Name of the stream, for messages.
        read_batches: Reads some columns, from the first row on.
    """
    return lambda columns: [SourceUnit(name, partial(read_batches, columns))]


def convert_source_columns(
    source: RowSource,
    plain_type: Callable[[Any], pa.DataType],
    plain_column: Callable[[Any, str], Any],
) -> RowSource:
    """Returns the source with converted columns; the source itself where no type changes.

    Args:
        source: As it was opened.
        plain_type: Returns the type that columns of a type become.
        plain_column: Returns an array in that type, given an array and the name of its column.
    """

    def plain_schema(schema: pa.Schema) -> pa.Schema:
        fields: list[Any] = [field.with_type(plain_type(field.type)) for field in schema]
        return pa.schema(fields, metadata=schema.metadata)

    def plain_batches(unit: SourceUnit) -> Iterator[pa.RecordBatch]:
        for batch in unit.batches():
            named = zip(batch.columns, batch.schema.names, strict=True)
            columns = [plain_column(column, name) for column, name in named]
            yield pa.RecordBatch.from_arrays(columns, schema=plain_schema(batch.schema))

    def list_units(columns: list[str]) -> list[SourceUnit]:
        return [
            replace(unit, batches=partial(plain_batches, unit)) for unit in source.units(columns)
        ]

    if all(plain_type(kind) == kind for kind in source.schema.types):
        return source
    return replace(source, schema=plain_schema(source.schema), units=list_units)
