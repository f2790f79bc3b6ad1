# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rows of Spark, of the Arrow batches that tasks get: what a user's function of one row takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

_SCALAR_CONVERTERS: dict[type[types.DataType], Callable[[Any], Any]] = {
    types.BinaryType: bytearray,
    types.TimestampType: lambda value: value.astimezone().replace(tzinfo=None),
}
"""Functions that make Spark's value of Arrow's, where these differ."""


def spark_rows(batch: pa.RecordBatch, schema: types.StructType) -> Iterator[types.Row]:
    """Yields the rows of a batch as a DataFrame's `rdd` has them: vectors are Spark's, structs are
    rows, bytes are a `bytearray`, and timestamps have no time zone and are of this host's.

    Args:
        batch: whose columns go by number.
        schema: names and types of these columns.
    """
    make_row = types.Row(*schema.names)
    converters = [_value_converter(field.dataType) for field in schema.fields]
    columns = [column.to_pylist() for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield make_row(*(convert(value) for convert, value in zip(converters, values, strict=True)))


def _value_converter(kind: types.DataType) -> Callable[[Any], Any]:
    """Returns the function that makes Spark's value of Arrow's; a null is `None`."""
    convert = _present_value_converter(kind)
    return lambda value: None if value is None else convert(value)


def _present_value_converter(kind: types.DataType) -> Callable[[Any], Any]:
    if isinstance(kind, types.UserDefinedType):
        stored = _value_converter(kind.sqlType())
        return lambda value: kind.deserialize(stored(value))
    if isinstance(kind, types.StructType):
        make_row = types.Row(*kind.names)
        fields = [(field.name, _value_converter(field.dataType)) for field in kind.fields]
        return lambda value: make_row(*(convert(value[name]) for name, convert in fields))
    if isinstance(kind, types.ArrayType):
        element = _value_converter(kind.elementType)
        return lambda value: [element(one) for one in value]
    if isinstance(kind, types.MapType):
        key, item = _value_converter(kind.keyType), _value_converter(kind.valueType)
        return lambda value: {key(one): item(other) for one, other in value}
    return _SCALAR_CONVERTERS.get(type(kind), lambda value: value)
