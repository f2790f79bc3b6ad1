# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks that the columns of a DataFrame have types that tensors can hold."""

# ruff: noqa: PLC0415 - training processes load no pyspark

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.data.encoding import column_of_feature

if TYPE_CHECKING:
    from collections.abc import Collection

    from pyspark.sql.types import DataType, StructType

    from farandole.data.columns import ColumnRoles

_SUPPORTED_TYPES_HINT = (
    "numbers, booleans, dates, times, arrays of these (nested or not) and Spark ML vectors are "
    "supported, strings and bytes where a transformation_fn makes numbers of them, and strings as "
    "categories"
)
_TEXT_TYPES = ("string", "varchar", "char", "binary")
_CATEGORY_TYPES = ("string", "varchar", "char", "boolean", "byte", "short", "integer", "long")


def check_types(
    roles: ColumnRoles, schema: StructType, *, texts: bool = False, categories: Collection[str] = ()
) -> None:
    """Refuses columns of a type that no tensor can hold.

    Args:
        roles: the requested columns, all of them in the schema.
        schema: the DataFrame's.
        texts: whether strings and bytes are accepted, because a `transformation_fn` makes numbers
            of them.
        categories: columns of categories, which may be strings.

    Raises:
        ValueError: naming the column and its type.
    """
    for role, name in roles.columns_with_roles():
        if column_of_feature(name, schema.names) != name:
            continue
        kind = schema[name].dataType
        shown = kind.simpleString()
        if name in categories:
            if kind.typeName() not in _CATEGORY_TYPES:
                raise ValueError(
                    f"{role} {name!r} has type {shown}: categories are strings, integers or "
                    "booleans"
                )
            continue
        if role == "sample weight column":
            if not _is_number_type(kind):
                raise ValueError(
                    f"{role} {name!r} must be a number or a boolean, its type is {shown}"
                )
        elif role == "validation column":
            if not _is_number_type(kind) and kind.typeName() not in ("string", "varchar", "char"):
                raise ValueError(
                    f"{role} {name!r} must be a number, a boolean or a string, its type is {shown}"
                )
        elif not _is_tensor_type(kind) and not (texts and kind.typeName() in _TEXT_TYPES):
            raise ValueError(
                f"{role} {name!r} has type {shown}, which no tensor can hold; "
                f"{_SUPPORTED_TYPES_HINT}"
            )


def _is_number_type(kind: DataType) -> bool:
    from pyspark.sql.types import BooleanType, NumericType

    return isinstance(kind, NumericType | BooleanType)


def _is_tensor_type(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, DateType, TimestampNTZType, TimestampType

    if isinstance(kind, ArrayType):
        return kind.elementType.typeName() != "vectorudt" and _is_tensor_type(kind.elementType)
    if _is_number_type(kind) or isinstance(kind, DateType | TimestampType | TimestampNTZType):
        return True
    return kind.typeName() == "vectorudt" or kind.simpleString() == "vector"
