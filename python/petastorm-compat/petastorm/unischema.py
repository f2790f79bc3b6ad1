# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`Unischema`: names, types, shapes and codecs of the fields of a data set."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, namedtuple
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from farandole.data.lazy_pyarrow import is_list_type, is_text_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_BYTES_TYPES = (pa.binary(), pa.large_binary(), pa.binary_view())
_SPARK_TYPES = {
    np.int8: "ByteType",
    np.uint8: "ShortType",
    np.int16: "ShortType",
    np.uint16: "IntegerType",
    np.int32: "IntegerType",
    np.int64: "LongType",
    np.float32: "FloatType",
    np.float64: "DoubleType",
    np.bytes_: "StringType",
    np.str_: "StringType",
    np.bool_: "BooleanType",
}


class UnischemaField(NamedTuple):
    """One field. Fields are equal if all but their codecs are."""

    name: str
    numpy_dtype: Any
    shape: tuple[int | None, ...]
    """Shape of one value; `None` is a dimension that varies."""
    codec: Any = None
    nullable: bool | None = False

    def __eq__(self, other: object) -> bool:
        """Returns whether name, type, shape and nullability are equal."""
        return isinstance(other, tuple) and _identity(self) == _identity(other)

    def __ne__(self, other: object) -> bool:
        """Returns the opposite of `==`."""
        return not self == other

    def __hash__(self) -> int:
        """Returns a hash that ignores the codec."""
        return hash(_identity(self))


def _identity(field: Any) -> tuple[Any, ...]:
    return (*field[:3], *field[4:])


class Unischema:
    """The fields of a data set, in order; each is an attribute, too."""

    def __init__(self, name: str, fields: Iterable[UnischemaField]) -> None:
        """Creates a schema.

        Args:
            name: Name of the schema; rows are named tuples called `<name>_view`.
            fields: The fields, in order.
        """
        self._name = name
        self._fields = OrderedDict((field.name, field) for field in fields)
        for field in self._fields.values():
            if hasattr(self, field.name):
                warnings.warn(
                    f"field {field.name!r} is no attribute of its Unischema, which has another "
                    "attribute of this name",
                    stacklevel=2,
                )
            else:
                setattr(self, field.name, field)

    def __getattr__(self, item: str) -> Any:
        """Returns a field."""  # only for type checkers: fields are attributes
        raise AttributeError(f"{type(self).__name__} {self.__dict__.get('_name')!r} has no {item}")

    @property
    def fields(self) -> OrderedDict[str, UnischemaField]:
        """The fields by name."""
        return self._fields

    def create_schema_view(self, fields: Sequence[Any]) -> Unischema:
        """Returns a schema of some fields: of this order, behind the fields that are given as such.

        Args:
            fields: Fields of this schema, and regular expressions that match whole names.

        Raises:
            ValueError: A field that this schema does not have, or no field at all.
        """
        patterns = [field for field in fields if isinstance(field, str)]
        chosen = [field for field in fields if isinstance(field, tuple)]
        if len(patterns) + len(chosen) != len(fields):
            raise ValueError(
                "fields must be regular expressions (str) or instances of UnischemaField: "
                f"{list(fields)!r}"
            )
        unknown = {field[0] for field in chosen} - set(self._fields)
        if unknown:
            raise ValueError(f"field {unknown} does not belong to the schema {self}")
        names = dict.fromkeys([field[0] for field in chosen])
        names |= dict.fromkeys(field.name for field in match_unischema_fields(self, patterns))
        return Unischema(f"{self._name}_view", [self._fields[name] for name in names])

    def make_namedtuple(self, **values: Any) -> Any:
        """Returns a row as a named tuple.

        Args:
            values: The values by name.
        """
        return self._get_namedtuple()(**values)

    def _get_namedtuple(self) -> Any:
        return _row_type(f"{self._name}_view", tuple(self._fields))

    def as_spark_schema(self) -> Any:
        """Returns the schema of a Spark DataFrame of encoded rows.

        Raises:
            ValueError: A field without a codec, of a type that Spark does not have.
        """
        from pyspark.sql import types  # noqa: PLC0415 - reading needs no Spark

        return types.StructType(
            [
                types.StructField(field.name, _spark_type(field), bool(field.nullable))
                for field in self._fields.values()
            ]
        )

    def __str__(self) -> str:
        """Returns the Python code of the schema."""
        lines = "".join(
            f"  UnischemaField('{field.name}', {getattr(field.numpy_dtype, '__name__', '?')}, "
            f"{field.shape}, {field.codec}, {field.nullable}),\n"
            for field in self._fields.values()
        )
        return f"{type(self).__name__}({self._name}, [\n{lines}])"

    @classmethod
    def from_arrow(cls, schema: pa.Schema, partitions: Sequence[str]) -> Unischema:
        """Returns the schema of Parquet that petastorm has not written.

        Args:
            schema: The columns; those of types without a dtype of NumPy are left out, with a
                warning.
            partitions: Columns whose values are in names of directories; they come first.
        """
        inside = [field for field in schema if field.name not in partitions]
        fields = []
        for field in [*(schema.field(name) for name in partitions), *inside]:
            is_list = is_list_type(field.type)
            dtype = _dtype_of_arrow_type(field.type.value_type if is_list else field.type)
            if dtype is None:
                warnings.warn(
                    f"Column {field.name!r} has an unsupported type, it is ignored: {field.type}",
                    stacklevel=2,
                )
                continue
            nullable = field.nullable and field.name not in partitions
            shape = (None,) if is_list else ()
            fields.append(UnischemaField(field.name, dtype, shape, None, nullable))
        return cls("inferred_schema", fields)


@cache
def _row_type(name: str, fields: tuple[str, ...]) -> Any:
    """Returns the type of rows: the same object for the same fields, as tf.data compares types."""
    return namedtuple(name, fields)  # noqa: PYI024 - the fields are data


def _spark_type(field: UnischemaField) -> Any:
    from pyspark.sql import types  # noqa: PLC0415 - reading needs no Spark

    if field.codec is not None:
        return field.codec.spark_dtype()
    if field.shape != () or field.numpy_dtype not in _SPARK_TYPES:
        raise ValueError(
            f"field {field.name!r} needs a codec: Spark has no type for values of "
            f"{field.numpy_dtype} and shape {field.shape}"
        )
    return getattr(types, _SPARK_TYPES[field.numpy_dtype])()


def _dtype_of_arrow_type(kind: pa.DataType) -> Any:
    """Returns the type of NumPy of a column; `None` if there is none."""
    types = pa.types
    if types.is_dictionary(kind):
        return _dtype_of_arrow_type(kind.value_type)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype()).type
    if is_text_type(kind):
        return np.str_
    if kind in _BYTES_TYPES or types.is_fixed_size_binary(kind):
        return np.bytes_
    if types.is_decimal(kind):
        return Decimal
    return np.datetime64 if types.is_date(kind) or types.is_timestamp(kind) else None


def match_unischema_fields(schema: Unischema, field_regex: Sequence[str]) -> list[UnischemaField]:
    """Returns the fields whose whole names match one of the patterns, in the schema's order.

    Args:
        schema: The schema.
        field_regex: Regular expressions.
    """
    return [
        field
        for name, field in schema.fields.items()
        if any(re.fullmatch(pattern, name) for pattern in field_regex)
    ]


def insert_explicit_nulls(unischema: Unischema, row_dict: dict[str, Any]) -> None:
    """Adds `None` for missing values.

    Args:
        unischema: The schema.
        row_dict: A row, which is changed.

    Raises:
        ValueError: A missing value of a field that is not nullable.
    """
    for name, field in unischema.fields.items():
        if name not in row_dict:
            if not field.nullable:
                raise ValueError(f"Field {name} is not in the row, but is not nullable.")
            row_dict[name] = None


def dict_to_spark_row(unischema: Unischema, row_dict: Mapping[str, Any]) -> Any:
    """Returns a row of Spark with the encoded values of a row.

    Args:
        unischema: The fields with their codecs.
        row_dict: The values by name.

    Raises:
        ValueError: Fields that do not match the schema, or a value that does not match its field.
    """
    import pyspark  # noqa: PLC0415 - reading needs no Spark

    values = dict(row_dict)
    insert_explicit_nulls(unischema, values)
    strange = sorted(set(values) - set(unischema.fields))
    if strange:
        raise ValueError(f"the schema {unischema._name} has no fields {', '.join(strange)}")  # noqa: SLF001
    encoded = []
    for name, field in unischema.fields.items():
        value = values[name]
        if value is None and not field.nullable:
            raise ValueError(f"Field {name} is not nullable, but its value is None.")
        if value is not None and field.codec is not None:
            value = field.codec.encode(field, value)
        encoded.append(value.tolist() if isinstance(value, np.generic) else value)
    row = pyspark.Row(*encoded)
    row.__fields__ = list(unischema.fields)
    return row
