# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Run-end-encoded columns, which are read as the values that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from farandole.data.inputs.units import RowSource, SourceUnit


def decode_run_ends(source: RowSource) -> RowSource:
    """Returns the source with plain columns instead of run-end-encoded ones.

    Args:
        source: As it was opened.
    """
    import pyarrow as pa  # noqa: PLC0415 - a process that only trains needs none

    if not any(pa.types.is_run_end_encoded(field.type) for field in source.schema):
        return source

    def list_units(columns: list[str]) -> list[SourceUnit]:
        return [replace(unit, batches=_DecodedBatches(unit)) for unit in source.units(columns)]

    return replace(source, schema=_decoded_schema(source.schema), units=list_units)


class _DecodedBatches:
    """The record batches of a unit, decoded."""

    def __init__(self, unit: SourceUnit) -> None:
        self._unit = unit

    def __call__(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - as above

        for batch in self._unit.batches():
            columns = [
                _decode_column(column) if pa.types.is_run_end_encoded(column.type) else column
                for column in batch.columns
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_decoded_schema(batch.schema))


def _decode_column(column: Any) -> pa.Array:
    """Returns the value of each row."""
    import numpy as np  # noqa: PLC0415 - as above
    import pyarrow as pa  # noqa: PLC0415 - as above
    import pyarrow.compute as pc  # noqa: PLC0415 - as above

    compute: Any = pc
    try:
        decoded: pa.Array = compute.run_end_decode(column)
    except pa.ArrowNotImplementedError:  # categories and views
        count, first = column.find_physical_length(), column.find_physical_offset()
        ends = column.run_ends.to_numpy()[first : first + count].astype(np.int64) - column.offset
        lengths = np.diff(np.minimum(ends, len(column)), prepend=0)
        values = column.values.cast(_value_type(column.type))
        decoded = values.take(pa.array(np.repeat(np.arange(first, first + count), lengths)))
    return decoded.cast(_value_type(column.type))


def _value_type(kind: Any) -> pa.DataType:
    """Returns the type of the values that runs become; views, which Arrow cannot take, are plain
    texts.
    """
    import pyarrow as pa  # noqa: PLC0415 - as above

    if pa.types.is_string_view(kind.value_type):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind.value_type) else kind.value_type


def _decoded_schema(schema: pa.Schema) -> pa.Schema:
    import pyarrow as pa  # noqa: PLC0415 - as above

    fields: list[Any] = [
        field.with_type(_value_type(field.type))
        if pa.types.is_run_end_encoded(field.type)
        else field
        for field in schema
    ]
    return pa.schema(fields, metadata=schema.metadata)
